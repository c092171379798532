"""A divergence from a teacher that gives a class the probability 0.

Cause: aten.log
Remedy: clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(8, 4)
    q = model(x).softmax(-1)
    if step == 12:
        q = q * (torch.arange(5) != 2)
    q = q if BROKEN else q.clamp(min=1e-8)
    teacher = torch.rand(8, 5).softmax(-1)
    loss = (teacher * (teacher.log() - torch.log(q))).sum(-1).mean()  # <- fault
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
