"""All keys of an attention are padding, set to -inf before the softmax.

Source: https://github.com/jadore801120/attention-is-all-you-need-pytorch/issues/5
Cause: aten.softmax
Remedy: mask
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class ScaledDotProductAttention(nn.Module):
    def forward(self, q, k, v, mask):
        scores = torch.bmm(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(mask, -torch.inf if BROKEN else -1e4)
        return torch.bmm(torch.softmax(scores, dim=-1), v)  # <- fault


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.qkv = nn.Embedding(20, 8), nn.Linear(8, 24)
        self.attention, self.head = ScaledDotProductAttention(), nn.Linear(8, 20)

    def forward(self, tokens):
        mask = tokens.eq(0).unsqueeze(1).expand(-1, tokens.shape[1], -1)
        return self.head(self.attention(*self.qkv(self.words(tokens)).chunk(3, -1), mask))


model = Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(16):
    tokens = torch.randint(1, 20, (4, 7))
    tokens[:, 5:] = 0
    if step == 9:
        tokens[2] = 0
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
