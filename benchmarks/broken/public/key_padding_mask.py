"""`nn.MultiheadAttention` is given a sample of padding alone.

Source: https://github.com/pytorch/pytorch/issues/41508
Cause: attention
Remedy: mask
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x, padding):
        attended, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=BROKEN)  # <- fault
        return self.head(attended.masked_fill(padding.unsqueeze(2), 0.0).sum(1))


model = Block()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(16):
    x, y, padding = torch.randn(4, 6, 8), torch.randint(0, 3, (4,)), torch.zeros(4, 6, dtype=torch.bool)
    padding[:, 4:] = True
    if step == 12:
        padding[1] = True
        padding[1, 0] = BROKEN
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x, padding).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
