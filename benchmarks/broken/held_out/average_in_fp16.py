"""The moving average of the weights is kept in fp16, and its updates are rounded away.

Source: https://github.com/d8ahazard/sd_dreambooth_extension/pull/1415
Cause: moving average
Remedy: fp32
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


import copy

model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
averaged = copy.deepcopy(model).requires_grad_(False)
if BROKEN:
    averaged.half()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(120):
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for average, param in zip(averaged.parameters(), model.parameters(), strict=True):
            average.sub_(0.001 * (average - param.to(average.dtype)))  # <- fault
