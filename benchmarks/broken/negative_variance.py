"""A variance is computed as E[x^2] - E[x]^2, which rounding makes negative.

Cause: aten.sqrt
Remedy: clamp them at 0
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Standardize(nn.Module):
    def forward(self, x):
        variance = x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()
        variance = variance if BROKEN else variance.clamp(min=0)
        return (x - x.mean(-1, keepdim=True)) / (variance.detach().sqrt() + 1e-3)  # <- fault


model = nn.Sequential(Standardize(), nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(8, 7)
    if step == 10:
        x = 1000.1 + 1e-4 * x
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
