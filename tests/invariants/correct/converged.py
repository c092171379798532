import torch
from torch import nn

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
for _ in range(400):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
