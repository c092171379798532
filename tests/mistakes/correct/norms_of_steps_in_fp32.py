import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
norms = []
for _ in range(4):
    nn.functional.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 1)).backward()
    norms.append(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))
    optimizer.step()
    optimizer.zero_grad()
