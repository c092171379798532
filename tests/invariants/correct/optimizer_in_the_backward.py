import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizers = {param: torch.optim.SGD([param], lr=0.01) for param in model.parameters()}


def step(param):
    optimizers[param].step()
    optimizers[param].zero_grad()


for param in model.parameters():
    param.register_post_accumulate_grad_hook(step)
for _ in range(24):
    model(torch.randn(4, 8)).square().mean().backward()
