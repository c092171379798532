"""The epsilon of `F.normalize` is 0 in fp16.

Source: https://github.com/pytorch/pytorch/issues/32137
Cause: aten.div
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Projection(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        x = self.linear(x)
        return F.normalize(x, dim=-1, eps=1e-12 if BROKEN else 1e-3)  # <- fault


model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), Projection())
head = nn.Linear(8, 3)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(16):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    if step == 7:
        x[5] = 0
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(head(model(x)).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
