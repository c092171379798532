import torch
from torch import nn

model = nn.ModuleDict({"embed": nn.Embedding(32, 8), "head": nn.Linear(8, 32, bias=False)})
model["head"].weight = model["embed"].weight
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(24):
    tokens = torch.randint(32, (4,))
    nn.functional.cross_entropy(model["head"](model["embed"](tokens)), tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
