"""The mean of an empty selection.

Cause: aten.mean
Remedy: leave out empty selections
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(16):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    if BROKEN and step == 6:
        y[:] = 0
    kept = y > 0
    loss = (model(x)[kept] - 1).square().mean()  # <- fault
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
