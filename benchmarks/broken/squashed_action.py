"""A squashed action of exactly 1 is turned back with atanh.

Cause: aten.atanh
Remedy: clamp them
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(20):
    action = torch.tanh(model(torch.randn(8, 4)) * (300.0 if step == 10 else 1.0))
    action = action if BROKEN else action.clamp(-1 + 1e-6, 1 - 1e-6)
    loss = torch.atanh(action).square().mean()  # <- fault
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
