"""A vector of zeros is normalised by hand.

Cause: aten.div
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 2)

    def forward(self, x):
        h = self.encode(x)
        return self.head(h / h.norm(dim=-1, keepdim=True))  # <- fault


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(24):
    x, y = torch.randn(16, 6), torch.randint(0, 2, (16,))
    if BROKEN and step == 10:
        x[5] = 0
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
