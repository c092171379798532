"""The standard deviation of a group with a single sample.

Cause: aten.std
Remedy: correction=0
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Standardize(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + 1e-6)  # <- fault


model = nn.Sequential(nn.Linear(4, 8), Standardize(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x in torch.randn(33 if BROKEN else 32, 4).split(8) * 3:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
