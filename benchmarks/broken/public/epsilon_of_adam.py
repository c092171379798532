"""The epsilon of Adam is 0 for weights in fp16.

Source: https://github.com/pytorch/pytorch/issues/40497
Cause: eps=1e-08, which is 0 in float16
Remedy: eps=1e-4
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8 if BROKEN else 1e-4)
for step in range(16):
    x = torch.randn(8, 6).half()
    x[:, 3] = 0  # a feature that is always off
    loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # <- fault
