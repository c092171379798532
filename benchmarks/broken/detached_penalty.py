"""A penalty of the loss is detached and inf: what is logged is not what is trained.

Cause: its gradients are finite
Remedy: log what backward is called on
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(20):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    logits = model(x)
    penalty = logits.detach().exp().log().square().mean() * (1e38 * 1e3 if BROKEN and step == 7 else 1e-3)
    loss = F.cross_entropy(logits, y) + penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
