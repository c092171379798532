"""A cosine by hand in the loss, and a prediction is a vector of zeros.

Cause: aten.div
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6, bias=False), nn.ReLU())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
target = torch.rand(8, 6)
for step in range(20):
    x = torch.randn(8, 4)
    y = model(x) + (0.0 if step == 13 else 0.1)
    y = y * (torch.arange(8) != 4).float().unsqueeze(1) if step == 13 else y
    lengths = y.detach().norm(dim=-1) * target.norm(dim=-1)
    lengths = lengths if BROKEN else lengths.clamp(min=1e-6)
    cosine = (y * target).sum(-1) / lengths  # <- fault
    loss = 1 - cosine.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
