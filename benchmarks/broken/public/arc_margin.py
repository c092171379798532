"""The sine of a margin loss is the root of 1 - cosine**2, below 0 by rounding.

Source: https://github.com/TFboys-lzz/MPSCL/issues/2
Cause: aten.sqrt
Remedy: clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class ArcMargin(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, width))

    def forward(self, x, y):
        cosine = F.linear(F.normalize(x), F.normalize(self.weight)).float()
        square = 1.0 - cosine.pow(2)
        sine = torch.sqrt(square if BROKEN else square.clamp(1e-4, 1))  # <- fault
        margin = cosine * 0.9 - sine * 0.4
        return 8 * torch.where(F.one_hot(y, len(self.weight)).bool(), margin, cosine)


embed, margin = nn.Linear(6, 8, bias=False), ArcMargin(8, 3)
optimizer = torch.optim.SGD([*embed.parameters(), *margin.parameters()], lr=1e-2)
for step in range(16):
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        features = embed(x)
        if step == 11:
            features = torch.cat([features[:7], margin.weight[y[7:]] * 3])  # it lies on the centre of its class
        loss = F.cross_entropy(margin(features, y), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
