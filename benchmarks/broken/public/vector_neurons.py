"""Vectors are divided by their norm, and one is 0.

Source: https://github.com/FlyingGiraffe/vnn/pull/4
Cause: aten.div
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class VectorNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x):
        length = x.norm(dim=2)
        scaled = self.norm(length)
        length = length if BROKEN else length + 1e-6
        return x / length.unsqueeze(2) * scaled.unsqueeze(2)  # <- fault


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(5, 8, bias=False)
        self.norm = VectorNorm(8)
        self.head = nn.Linear(24, 3)

    def forward(self, points):
        return self.head(self.norm(self.mix(points.transpose(1, 2)).transpose(1, 2)).flatten(1))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(16):
    points, y = torch.randn(8, 5, 3), torch.randint(0, 3, (8,))
    if step == 5:
        points[6] = 0
    loss = F.cross_entropy(model(points), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
