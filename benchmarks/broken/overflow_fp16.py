"""A product of a module overflows fp16 and not fp32.

Cause: aten.mul
Remedy: in fp32
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Gate(nn.Module):
    def forward(self, x):
        return (x * 300 * 300).float() * 1e-6  # <- fault


model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), Gate() if BROKEN else nn.Tanh(), nn.Linear(8, 1))
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(16):
    with torch.autocast("cpu", torch.float16):
        y = model(torch.randn(8, 4) + 1)
    loss = y.float().square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
