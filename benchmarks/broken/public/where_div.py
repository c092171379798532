"""torch.where replaces 0/0 in the forward pass, and the gradient stays NaN.

Source: https://github.com/pytorch/pytorch/issues/16317
Cause: gradient of aten.div
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Mean(nn.Module):
    def forward(self, x, mask):
        count = mask.sum(1, keepdim=True)
        count_or_one = count if BROKEN else count.clamp_min(1)
        mean = (x * mask.unsqueeze(2)).sum(1) / count_or_one  # <- fault
        return torch.where(count == 0, torch.zeros_like(mean), mean)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mean, self.head = nn.Linear(4, 8), Mean(), nn.Linear(8, 3)

    def forward(self, x, mask):
        return self.head(self.mean(self.embed(x), mask))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(16):
    x, y, mask = torch.randn(6, 5, 4), torch.randint(0, 3, (6,)), (torch.rand(6, 5) > 0.3).float()
    mask[:, 0] = 1
    if step == 10:
        mask[4] = 0
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x, mask).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
