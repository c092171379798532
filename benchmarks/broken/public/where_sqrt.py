"""torch.where hides the root of negative numbers in the forward pass alone.

Source: https://github.com/pytorch/pytorch/issues/187297
Cause: aten.sqrt
Remedy: clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class SignedRoot(nn.Module):
    def forward(self, x):
        root = torch.sqrt(x if BROKEN else x.clamp_min(1e-6))  # <- fault
        return torch.where(x > 1e-6, root, x)


model = nn.Sequential(nn.Linear(4, 16, bias=False), SignedRoot(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(16):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(8, 4)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
