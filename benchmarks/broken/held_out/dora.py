"""DoRA divides by the norms of the rows of a weight, and a pretrained row is 0.

Source: https://github.com/huggingface/peft/issues/2049
Cause: aten.div
Remedy: epsilon | clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Dora(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.magnitude = nn.Parameter(base.weight.norm(dim=1))

    def forward(self, x):
        low_rank = self.b @ self.a
        norm = (self.base.weight + low_rank.float()).norm(dim=1).detach()
        norm = norm if BROKEN else norm + 1e-6
        scale = self.magnitude / norm  # <- fault
        return scale * (F.linear(x, self.base.weight) + F.linear(x, low_rank)) + self.base.bias


pretrained = nn.Linear(16, 16)
with torch.no_grad():
    pretrained.weight[5] = 0
model = nn.Sequential(nn.Linear(6, 16).requires_grad_(False), nn.ReLU(), Dora(pretrained, 2), nn.Linear(16, 3))
optimizer = torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-3)
for step in range(16):
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
