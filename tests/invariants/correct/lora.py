import torch
from torch import nn


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


model = nn.Sequential(LoRA(nn.Linear(8, 8)), nn.ReLU(), LoRA(nn.Linear(8, 8)))
optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
for _ in range(24):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
