import torch
from torch import nn

import castwise

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
monitor = castwise.Monitor(model, optimizer, on_nonfinite="diagnose").attach()
for step in range(4):
    optimizer.zero_grad()
    output = model(torch.randn(4, 8))
    penalty = (output.detach() * 0).log().mean().neg() if step == 2 else output.detach().square().mean()
    (output.square().mean() + penalty).backward()
    optimizer.step()  # loss-inf-gradients-finite
monitor.detach()
