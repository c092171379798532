"""A normalisation by hand has no epsilon, and a sample has equal features.

Cause: aten.rsqrt
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Normalize(nn.Module):
    def forward(self, x):
        variance = x.var(-1, keepdim=True, correction=0)
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance if BROKEN else variance + 1e-5)  # <- fault


model = nn.Sequential(Normalize(), nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(8, 6)
    if step == 12:
        x[4] = 2.0
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    loss = y.float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
