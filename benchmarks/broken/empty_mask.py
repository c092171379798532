"""A masked mean in the model divides by the number of tokens, and a sample has none.

Cause: aten.div
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 3)

    def forward(self, tokens):
        mask = (tokens != 0).float().unsqueeze(-1)
        count = mask.sum(1)
        count = count if BROKEN else count.clamp(min=1)
        pooled = (self.embed(tokens) * mask).sum(1) / count  # <- fault
        return self.head(pooled)


model = Pooled()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    tokens = torch.randint(1, 30, (8, 6))
    if step == 8:
        tokens[2] = 0
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    loss = F.cross_entropy(logits.float(), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
