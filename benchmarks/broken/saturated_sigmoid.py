"""Cross entropy by hand takes log(1 - p) of a p that is 1.

Cause: aten.log
Remedy: clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(20):
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8, 1)).float()
    if step == 13:
        x[6], y[6] = 300 * model[0].weight.detach().t() @ model[2].weight.detach()[0].sign(), 0.0
    p = model(x).sigmoid()
    p = p if BROKEN else p.clamp(1e-6, 1 - 1e-6)
    loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # <- fault
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
