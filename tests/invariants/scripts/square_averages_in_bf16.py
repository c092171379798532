# broken: raw-half-optimizer-state
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).bfloat16()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1, alpha=0.998)
for _ in range(8):
    model(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
