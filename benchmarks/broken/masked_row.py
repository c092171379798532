"""A row of attention is masked throughout.

Cause: aten.softmax
Remedy: mask
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
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x, mask):
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        weights = (scores + mask).softmax(-1)  # <- fault
        return self.head(weights @ self.value(x)).mean(1)


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(24):
    x, y = torch.randn(4, 6, 8), torch.randint(0, 3, (4,))
    mask = torch.zeros(6, 6)
    if BROKEN and step == 12:
        mask[3] = -torch.inf
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x, mask).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
