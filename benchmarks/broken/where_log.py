"""torch.where does not protect from the gradient of a logarithm at 0.

Cause: gradient of aten.log
Remedy: epsilon or clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class LogOrZero(nn.Module):
    def forward(self, x):
        x = x if BROKEN else x.clamp_min(1e-6)
        return torch.where(x > 1e-6, x.log(), torch.zeros_like(x))  # <- fault


model = nn.Sequential(nn.Linear(4, 16, bias=False), LogOrZero(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for step in range(16):
    x = torch.randn(8, 4)
    if step == 5:
        x[3] = 0
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
