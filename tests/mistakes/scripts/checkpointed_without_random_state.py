import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(4, 8)
    hidden = checkpoint(model[:2], x, use_reentrant=False, preserve_rng_state=False)  # recomputed-at-random
    optimizer.zero_grad()
    nn.functional.mse_loss(model[2](hidden), torch.zeros(4, 1)).backward()
    optimizer.step()
