"""Gradients are never zeroed.

Cause: not zeroed
Remedy: zero_grad
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(20):
    loss = model(torch.randn(8, 4)).square().mean()
    if not BROKEN:
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # <- fault
