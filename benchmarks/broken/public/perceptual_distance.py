"""Features of an image are all 0, and so is the root that they are divided by.

Source: https://github.com/richzhang/PerceptualSimilarity/pull/139
Cause: gradient of aten.sqrt
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Distance(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.AvgPool2d(2))

    def unit(self, x):
        norm = torch.sqrt((x**2).sum(1, keepdim=True) + (0 if BROKEN else 1e-6))  # <- fault
        return x / (norm + 1e-10)

    def forward(self, x, y):
        return (self.unit(self.features(x)) - self.unit(self.features(y))).square().mean()


decoder, distance = nn.Conv2d(3, 3, 1, bias=False), Distance()
optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-3)
for step in range(16):
    image = torch.rand(4, 3, 8, 8)
    if step == 6:
        image[2, :, :4] = 0  # letterboxed
    with torch.autocast("cpu", torch.bfloat16):
        loss = distance(decoder(image), image)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
