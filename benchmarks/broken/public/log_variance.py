"""A variational encoder takes the exponential of an unbounded logarithm.

Source: https://github.com/pyg-team/pytorch_geometric/issues/500
Cause: aten.exp
Remedy: clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.log_std, self.decode = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, x):
        mean, log_std = self.mean(x).float(), self.log_std(x).float()
        log_std = log_std if BROKEN else log_std.clamp(max=10)
        std = torch.exp(log_std)  # <- fault
        kl = -0.5 * (1 + 2 * log_std - mean**2 - std**2).sum(1).mean()
        return self.decode(mean + torch.randn_like(std) * std), kl


model = Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(16):
    x = torch.randn(8, 6)
    if step == 12:
        x[2] *= 1000  # a node with very many edges
    with torch.autocast("cpu", torch.bfloat16):
        decoded, kl = model(x)
        loss = F.mse_loss(decoded.float(), x) + 0.01 * kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
