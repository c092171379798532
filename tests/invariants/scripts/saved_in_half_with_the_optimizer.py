# broken: dtype-of-checkpoint
import io

import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 5:
        weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
        torch.save({"model": weights, "optimizer": optimizer.state_dict()}, io.BytesIO())
