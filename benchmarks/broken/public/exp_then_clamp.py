"""An exponential is clamped after it has overflowed.

Source: https://github.com/megvii-model/YOLOF/issues/51
Cause: aten.exp
Remedy: clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores, self.objectness = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x):
        score, objectness = self.scores(x).float(), self.objectness(x).float().tanh()
        bounded = score.exp().clamp(max=1e8) if BROKEN else score.clamp(max=18.4).exp()  # <- fault
        return score + objectness - torch.log(1.0 + bounded + objectness.exp())


model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Head())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(16):
    x, y = torch.randn(8, 6), torch.rand(8, 3).round()
    if step == 7:
        x = x * 10000
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.binary_cross_entropy_with_logits(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
