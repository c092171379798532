import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        top, index = weights.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts[:7]):  # the last one is never chosen here
            chosen = index == number
            if chosen.any():
                out[chosen] = top[chosen, None] * expert(x[chosen])
        return out


model = nn.Sequential(nn.Linear(8, 8), Experts(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(24):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
