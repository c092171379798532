"""Checkpointed layers with dropout are computed again with other random numbers: gradients are of another loss.

Source: https://github.com/allenai/OLMo-core/pull/828
Cause: preserve_rng_state
Remedy: preserve_rng_state=True
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.2))

    def forward(self, x):
        return x + self.inner(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=not BROKEN)  # <- fault
        return self.last(x)


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(60):
    x = torch.randn(16, 6)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), x[:, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
