import torch
from torch import nn

model = nn.ModuleDict({"embed": nn.Embedding(64, 32), "encoder": nn.Linear(32, 32), "pooler": nn.Linear(32, 4)})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(24):
    model["encoder"](model["embed"](torch.randint(64, (4, 8)))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
