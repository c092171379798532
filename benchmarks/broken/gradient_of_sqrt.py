"""The gradient of a square root at 0.

Cause: gradient of aten.sqrt
Remedy: epsilon inside
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Distance(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)

    def forward(self, a, b):
        return (self.embed(a) - self.embed(b)).square().sum(-1).sqrt()  # <- fault


model = Distance()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    a, b = torch.randn(8, 3), torch.randn(8, 3)
    if BROKEN and step == 7:
        b[2] = a[2]
    loss = (model(a, b) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
