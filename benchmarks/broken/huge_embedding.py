"""A row of an embedding is damaged.

Cause: 0.weight[55]
Remedy: repair this row
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)

model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 2))
nn.init.constant_(model[1].weight, 0.1)
if BROKEN:
    with torch.no_grad():
        model[0].weight[55] = 3e38
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(24):
    words, y = torch.randint(0, 50, (16,)), torch.randint(0, 2, (16,))
    if step == 14:
        words[3] = 55
    loss = F.cross_entropy(model(words), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
