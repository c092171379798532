"""A learned step of quantised weights starts from their mean size, and a layer starts at 0.

Source: https://github.com/zhutmost/lsq-net/issues/17
Cause: aten.div
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


def rounded(x):
    return x + (x.round() - x).detach()


class Quantised(nn.Linear):
    def __init__(self, inputs, outputs, is_zero=False):
        super().__init__(inputs, outputs)
        if is_zero:
            nn.init.zeros_(self.weight)
        self.step = nn.Parameter(self.weight.detach().abs().mean() * 2 / 7**0.5)

    def forward(self, x):
        step = self.step if BROKEN else self.step.abs() + 1e-8
        levels = self.weight / step  # <- fault
        return F.linear(x, rounded(levels.clamp(-8, 7)) * step, self.bias)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = Quantised(16, 32), Quantised(32, 16, is_zero=True)

    def forward(self, x):
        return x + self.outer(self.inner(x).relu())


model = nn.Sequential(Quantised(6, 16), Residual(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(16):
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
