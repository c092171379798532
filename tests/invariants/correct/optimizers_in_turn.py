import torch
from torch import nn

model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
first = torch.optim.SGD(model["a"].parameters(), lr=0.1)
second = torch.optim.SGD(model["b"].parameters(), lr=0.1)
for step in range(80):
    model["b"](model["a"](torch.randn(4, 8))).square().mean().backward()
    (first if step < 40 else second).step()
    model.zero_grad()
