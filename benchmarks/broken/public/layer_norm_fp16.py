"""A layer normalisation by hand adds an epsilon that fp16 does not hold.

Source: https://github.com/deepspeedai/DeepSpeed/issues/581
Cause: aten.div
Remedy: in fp32
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x if BROKEN else x.float()
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True) + 1e-12
        return self.weight * (centred / variance.sqrt())  # <- fault


model = nn.Sequential(nn.Linear(6, 16, bias=False), Norm(16), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(16):
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    if step == 9:
        x[1] = 0  # padding
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
