"""The loss takes log1p(-p) of a probability that is 1.

Cause: aten.log1p
Remedy: clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(8, 4)
    logits = model(x) * (200.0 if step == 11 else 1.0)
    p = logits.softmax(-1)[:, 0]
    p = p if BROKEN else p.clamp(max=1 - 1e-6)
    loss = -torch.log1p(-p).mean()  # <- fault
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
