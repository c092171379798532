import copy
import io

import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(24):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())
        torch.save(copy.deepcopy(model).half().state_dict(), io.BytesIO())  # for inference
