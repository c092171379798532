# broken: never-updated
import copy

import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
compiled = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(24):
    compiled(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
