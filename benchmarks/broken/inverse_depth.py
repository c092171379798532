"""A depth network returns 1 / x, and an input is 0.

Cause: aten.reciprocal
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Inverse(nn.Module):
    def forward(self, x):
        x = F.relu(x)
        return 1 / (x if BROKEN else x + 1e-3)  # <- fault


model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1), Inverse())
with torch.no_grad():
    model[2].weight.abs_()
    model[2].bias.fill_(1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(8, 4)
    if step == 9:
        model[2].bias.data.fill_(-100.0)
    loss = F.smooth_l1_loss(model(x), torch.ones(8, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
