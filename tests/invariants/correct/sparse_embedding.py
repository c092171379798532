import torch
from torch import nn

model = nn.ModuleDict({"embed": nn.Embedding(1000, 8, sparse=True), "head": nn.Linear(8, 1)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(24):
    model["head"](model["embed"](torch.randint(8, (4,)))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
