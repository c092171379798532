"""The loss is scaled by one scaler, and another one steps.

Cause: scaler
Remedy:
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
other = torch.amp.GradScaler("cpu", init_scale=1.0) if BROKEN else scaler
other.scale(torch.zeros(()))  # as if it scaled another loss
for step in range(16):
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(8, 4)).float().square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    other.step(optimizer)  # <- fault
    other.update()
