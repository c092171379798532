import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.95))
for _ in range(24):
    model(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
