import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(4):
    loss = nn.functional.mse_loss(model(torch.randn(4, 8).bfloat16()).float(), torch.zeros(4, 1))
    loss.backward()
    optimizer.step()  # updates-lost
    optimizer.zero_grad()
