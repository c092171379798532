import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(96):
    model(torch.randn(4, 8)).square().mean().backward()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
