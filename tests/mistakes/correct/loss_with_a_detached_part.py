import torch
from torch import nn

import castwise

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
monitor = castwise.Monitor(model, optimizer, on_nonfinite="diagnose").attach()
for _ in range(4):
    optimizer.zero_grad()
    output = model(torch.randn(4, 8))
    (output.square().mean() + output.detach().abs().mean()).backward()
    optimizer.step()
monitor.detach()
