"""A checkpoint has a NaN among its weights.

Cause: 2.weight is nan
Remedy: load a checkpoint
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)

import io

model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
weights = model.state_dict()
if BROKEN:
    weights["2.weight"][1, 7] = torch.nan
file = io.BytesIO()
torch.save(weights, file)
file.seek(0)
model.load_state_dict(torch.load(file))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
