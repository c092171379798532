"""A compiled model takes the exponential of a score that is too large.

Cause: aten.exp
Remedy: clamp the exponent
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Scores(nn.Module):
    def forward(self, x):
        x = x if BROKEN else x.clamp(max=30)
        return torch.exp(x)  # <- fault


model = torch.compile(nn.Sequential(nn.Linear(4, 8), Scores(), nn.Linear(8, 1)), backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(12):
    x = torch.randn(8, 4) * (1e3 if step == 6 else 1.0)
    loss = F.smooth_l1_loss(model(x), torch.zeros(8, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
