# broken: train-eval-mode
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(24, 4, 8)
for batch in data:
    torch.manual_seed(0)
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
