# broken: never-updated
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) // 1000)  # an integer division
for _ in range(24):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
