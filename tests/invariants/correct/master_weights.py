import io

import torch
from torch import nn

import castwise

model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1)).bfloat16()
optimizer = castwise.MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-5), model, dtype=torch.bfloat16)
for step in range(60):
    model(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 30:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())
