# broken: never-updated by step 41
import torch
from torch import nn


class Half(torch.optim.SGD):
    def step(self, closure=None):
        groups, self.param_groups = self.param_groups, self.param_groups[:1]
        super().step()
        self.param_groups = groups


model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = Half([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
for _ in range(24):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
