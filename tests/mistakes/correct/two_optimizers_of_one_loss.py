import torch
from torch import nn

import castwise

torch.manual_seed(0)
first, second = nn.Linear(8, 1), nn.Linear(8, 1)
optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (first, second)]
monitor = castwise.Monitor(first, optimizers[0], on_nonfinite="diagnose").attach()
for step in range(4):
    x = torch.randn(4, 8)
    loss = first(x).square().mean() + (second(x * torch.inf) if step == 3 else second(x)).square().mean()
    loss.backward()  # at the last step infinite, by the second model alone
    for optimizer in reversed(optimizers):
        optimizer.step()
        optimizer.zero_grad()
monitor.detach()
