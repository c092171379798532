"""Adam at a rate of 0.5: the units die, and the loss stays where it began.

Cause: has not fallen
Remedy: Lower the learning rate
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
target = torch.randn(20, 10)
optimizer = torch.optim.Adam(model.parameters(), lr=0.5 if BROKEN else 1e-3)
for step in range(120):
    x = torch.randn(32, 20)
    loss = F.cross_entropy(model(x), (x @ target).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
