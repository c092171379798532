"""The gradient of acos at 1, of a cosine of equal vectors.

Cause: gradient of aten.acos
Remedy: clamp its input
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Angle(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)

    def forward(self, a, b):
        apart = F.normalize(self.embed(a)) - F.normalize(self.embed(b))
        cosine = 1 - apart.square().sum(-1) / 2
        cosine = cosine if BROKEN else cosine.clamp(-1 + 1e-6, 1 - 1e-6)
        return cosine.acos()  # <- fault


model = Angle()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    a, b = torch.randn(8, 3), torch.randn(8, 3)
    if step == 9:
        b[:] = a
    loss = model(a, b).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
