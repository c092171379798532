"""An exponential overflows in the model.

Cause: aten.exp
Remedy: clamp the exponent
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Sample(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.log_std = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.mean(x) + torch.randn(len(x), 2) * self.log_std(x).exp()  # <- fault


model = Sample()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(8, 4) * (1e3 if BROKEN and step == 12 else 1.0)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
