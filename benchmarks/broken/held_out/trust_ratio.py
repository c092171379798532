"""An optimizer multiplies steps by the norm of the weights, and biases start at 0: they never move.

Source: https://github.com/cybertronai/pytorch-lamb/pull/6
Cause: 1.bias
Remedy: trust
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                for name in ("mean", "square"):
                    state.setdefault(name, torch.zeros_like(param))
                state["mean"].lerp_(param.grad, 0.1)
                state["square"].lerp_(param.grad.square(), 0.001)
                update = state["mean"] / (state["square"].sqrt() + 1e-6)
                trust = param.norm() / update.norm()
                if not BROKEN and param.norm() == 0:
                    trust = 1.0
                param.sub_(group["lr"] * trust * update)  # <- fault


model = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))
optimizer = Lamb(model.parameters(), lr=1e-2)
for step in range(60):
    x = torch.randn(16, 6)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), x[:, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
