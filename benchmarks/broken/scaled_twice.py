"""The loss is scaled twice.

Cause: already scaled
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
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(16):
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(8, 4)).float().square().mean()
    loss = scaler.scale(loss) if BROKEN else loss
    optimizer.zero_grad()
    scaler.scale(loss).backward()  # <- fault
    scaler.step(optimizer)
    scaler.update()
