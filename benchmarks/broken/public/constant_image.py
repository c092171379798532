"""Images are divided by their standard deviation, and one is constant.

Source: https://github.com/facebookresearch/fastMRI/issues/139
Cause: aten.div
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class NormalizedUnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))

    def forward(self, x):
        mean, std = x.mean((1, 2, 3), keepdim=True), x.std((1, 2, 3), keepdim=True)
        std = std if BROKEN else std + 1e-5
        return self.net((x - mean) / std) * std + mean  # <- fault


model = NormalizedUnet()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
for step in range(16):
    image = torch.randn(4, 1, 12, 12)
    if step == 8:
        image[3] = 0.0
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.l1_loss(model(image + 0.0), image)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
