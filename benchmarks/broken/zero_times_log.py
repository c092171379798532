"""The entropy of probabilities of which one is 0: 0 * log 0.

Cause: aten.log
Remedy:
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(24):
    x = torch.randn(8, 4)
    logits = model(x) * (1e4 if BROKEN and step == 9 else 1.0)
    p = logits.softmax(-1)
    loss = (p * p.log()).sum(-1).mean()  # <- fault
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
