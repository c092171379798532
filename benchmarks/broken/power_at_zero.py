"""A power of one half in the model, of features of which a ReLU has made one 0.

Cause: gradient of aten.pow
Remedy: epsilon inside
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Root(nn.Module):
    def forward(self, x):
        x = x if BROKEN else x + 1e-6
        return x**0.5  # <- fault


model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), Root(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    x = torch.randn(8, 4)
    if step == 7:
        x[3] = -1e4 * model[0].weight.detach().sum(0)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
