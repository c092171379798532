import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
model[:2].requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(24):
    model.train()
    model[1].eval()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
