"""A predicted standard deviation underflows to 0, and an error is divided by it.

Source: https://github.com/mllam/neural-lam/pull/537
Cause: aten.div
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.std = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        std = F.softplus(self.std(x).float())
        return self.mean(x).float(), std if BROKEN else std.clamp_min(1e-6)


class NegativeLogLikelihood(nn.Module):
    def forward(self, mean, std, y):
        return (((mean - y) / std).square() / 2 + std.log()).mean()  # <- fault


model, loss_fn = Forecast(), NegativeLogLikelihood()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(16):
    x, y = torch.randn(8, 6), torch.randn(8, 2)
    if step == 8:
        x[5] *= 3000
    with torch.autocast("cpu", torch.bfloat16):
        mean, std = model(x)
    loss = loss_fn(mean, std, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
