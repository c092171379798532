# broken: never-updated
import torch
from torch import nn

torch.manual_seed(0)
model = nn.ModuleDict({"encoder": nn.Linear(8, 16), "head": nn.Linear(16, 1)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(24):
    with torch.no_grad():
        features = model["encoder"](torch.randn(4, 8))
    model["head"](features).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
