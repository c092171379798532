import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    hidden = checkpoint(model[:2], torch.randn(4, 8), use_reentrant=False)
    output = checkpoint(model[2], hidden, use_reentrant=False, preserve_rng_state=False)  # draws nothing
    with torch.no_grad():
        checkpoint(model, torch.randn(4, 8), use_reentrant=False, preserve_rng_state=False)  # has no backward
    optimizer.zero_grad()
    nn.functional.mse_loss(output, torch.zeros(4, 1)).backward()
    optimizer.step()
