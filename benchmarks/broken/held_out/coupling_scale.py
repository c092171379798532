"""A coupling layer of a flow takes the exponential of a scale without bounds, and an input is far out.

Source: https://github.com/VincentStimper/normalizing-flows/issues/47
Cause: aten.exp
Remedy: clamp | sigmoid
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 6))

    def forward(self, x):
        kept, moved = x.chunk(2, 1)
        shift, scale = self.net(kept).float().chunk(2, 1)
        scale = scale if BROKEN else 2 * torch.tanh(scale / 2)
        moved = (moved - shift) * torch.exp(-scale)  # <- fault
        return torch.cat([moved, kept], 1), -scale.sum(1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Coupling() for _ in range(6))

    def forward(self, x):
        log_det = 0.0
        for layer in self.layers:
            x, of_layer = layer(x)
            log_det = log_det + of_layer
        return x, log_det


flow = Flow()
optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
for step in range(16):
    x = torch.randn(32, 6)
    if step == 9:
        x[4] *= 300  # a heavy tail
    with torch.autocast("cpu", torch.bfloat16):
        z, log_det = flow(x)
    loss = (0.5 * z.square().sum(1) - log_det).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
