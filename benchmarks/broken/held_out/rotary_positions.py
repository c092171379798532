"""Positions of rotary embeddings are counted in bf16, which has no odd numbers above 256.

Source: https://github.com/EleutherAI/gpt-neox/issues/1003
Cause: inv_freq | position
Remedy: fp32
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, width, 2) / width))

    def forward(self, x):
        positions = torch.arange(x.shape[1]).type_as(self.inv_freq)
        angles = positions[:, None] * self.inv_freq  # <- fault
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.qkv, self.head = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 20)
        self.rotary = Rotary(16)

    def forward(self, tokens):
        q, k, v = self.qkv(self.embedding(tokens)).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(self.rotary(q).to(v), self.rotary(k).to(v), v, is_causal=True))


model = Attention()
if BROKEN:
    model.rotary.to(torch.bfloat16)  # with the rest of a model that keeps its weights in bf16
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(16):
    tokens = torch.randint(0, 20, (2, 601))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
