import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(24):
    torch.manual_seed(0)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
