"""A learning rate at which the weights grow until they overflow.

Cause: diverged
Remedy: learning rate
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
target = torch.randn(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.5 if BROKEN else 1e-2)
for step in range(40):
    x = torch.randn(32, 8)
    loss = F.mse_loss(model(x), x @ target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
