"""A focal loss takes a power below 1 of a probability that is exactly 0.

Source: https://github.com/kornia/kornia/issues/918
Cause: gradient of aten.pow
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class FocalLoss(nn.Module):
    def forward(self, logits, y):
        p, eps = torch.sigmoid(logits), 1e-6
        wrong, right = (p, 1 - p) if BROKEN else (p + eps, 1 - p + eps)
        hard, easy = right.pow(0.5), wrong.pow(0.5)  # <- fault
        return -(hard * y * torch.log(p + eps) + easy * (1 - y) * torch.log(1 - p + eps)).mean()


model, loss_fn = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), FocalLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(16):
    x = torch.randn(8, 4)
    y = (x[:, :1] > 0).float()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    logits = logits.float() * (400 if step == 9 else 1)  # a very sure model
    loss = loss_fn(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
