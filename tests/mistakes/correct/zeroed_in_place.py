import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(6):
    for _ in range(2):
        nn.functional.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 1)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
