"""Label smoothing reads logits that are masked with -inf.

Cause: log_softmax
Remedy: finite number
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
allowed = torch.tensor([True, True, True, False, True])
for step in range(16):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    logits = model(x).masked_fill(~allowed, -torch.inf if BROKEN else -1e4)
    loss = F.cross_entropy(logits, y, label_smoothing=0.1)  # <- fault
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
