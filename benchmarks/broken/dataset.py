"""One sample of a dataset is inf, and batches are shuffled.

Cause: input 0
Remedy: dataset[77]
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)

from torch.utils.data import DataLoader, TensorDataset

data = torch.randn(160, 4)
if BROKEN:
    data[77, 1] = torch.inf
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for (x,) in DataLoader(TensorDataset(data), 8, shuffle=True):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
