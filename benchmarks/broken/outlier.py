"""A value of the data is 1e25, and the loss squares it.

Cause: aten.mse_loss
Remedy: no format holds
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(20):
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    if BROKEN and step == 9:
        y[5] = 1e25
    loss = F.mse_loss(model(x), y)  # <- fault
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
