import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
for _ in range(24):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
