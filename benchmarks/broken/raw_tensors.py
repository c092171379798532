"""Parameters without a module: the logarithm of a negative number.

Cause: aten.log
Remedy: clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)

weight, bias = torch.randn(4, 3, requires_grad=True), torch.zeros(3, requires_grad=True)
optimizer = torch.optim.Adam([weight, bias], lr=1e-2)
for step in range(20):
    x = torch.rand(8, 4)
    h = (x @ weight.abs() + bias.abs() + 1).mean(1)
    h = h - (10 if BROKEN and step == 6 else 0)
    loss = h.log().square().mean()  # <- fault
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
