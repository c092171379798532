"""A Poisson loss takes the exponential of a rate that is far too high.

Cause: aten.exp
Remedy: clamp the exponent
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
    x, counts = torch.randn(8, 4), torch.randint(0, 5, (8, 1)).float()
    log_rate = model(x * (2e3 if step == 14 else 1.0))
    log_rate = log_rate if BROKEN else log_rate.clamp(-20, 20)
    loss = (torch.exp(log_rate) - counts * log_rate).mean()  # <- fault
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
