# broken: not-in-optimizer
import torch
from torch import nn
from torch.nn.utils import parametrizations

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
parametrizations.weight_norm(model[0])
for _ in range(24):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
