import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
for _ in range(24):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for param in model[2].parameters():
            param -= 0.1 * param.grad
    model.zero_grad()
