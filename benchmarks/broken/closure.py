"""LBFGS calls a closure, and a sample of its batch is NaN.

Cause: input 0
Remedy: sample 3 of the batch
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
for step in range(12):
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    if BROKEN and step == 6:
        x[3, 1] = torch.nan

    def closure(x=x, y=y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
