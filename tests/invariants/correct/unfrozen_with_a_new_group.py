import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
model[0].requires_grad_(False)
optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
for step in range(24):
    if step == 12:
        optimizer.add_param_group({"params": model[0].requires_grad_(True).parameters()})
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
