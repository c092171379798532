"""The loss takes the logarithm of a probability of 0, in fp16 with a scaler.

Cause: aten.log
Remedy: epsilon or clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(24):
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    with torch.autocast("cpu", torch.float16):
        p = model(x * (1e3 if BROKEN and step == 12 else 1.0)).float().softmax(-1)
        p = p if BROKEN else p.clamp_min(1e-6)
        loss = -(p.log()[:, 0] * (y == 0) + p.log()[:, 1] * (y == 1)).mean()  # <- fault
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
