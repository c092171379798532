"""Keys are summed over a long sequence in fp16.

Source: https://github.com/idiap/fast-transformers/issues/32
Cause: aten.
Remedy: in fp32
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class LinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if not BROKEN:
            q, k, v = q.float(), k.float(), v.float()
        with torch.autocast("cpu", enabled=False):
            values = k.transpose(1, 2) @ v  # <- fault
            return q @ values / (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)


model = nn.Sequential(nn.Linear(4, 8), LinearAttention(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(16):
    x = torch.randn(2, 512, 4) * (60 if step == 11 else 1)
    with torch.autocast("cpu", torch.float16):
        loss = model(x).float().square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
