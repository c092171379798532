# broken: not-in-optimizer
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
model[0].requires_grad_(False)
optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
for step in range(24):
    if step == 5:
        model[0].requires_grad_(True)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
