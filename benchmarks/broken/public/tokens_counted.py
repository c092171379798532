"""A sum of losses is divided by the number of tokens, which is 0.

Source: https://github.com/meta-pytorch/torchtune/issues/2341
Cause: aten.div
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class ChunkedCrossEntropy(nn.Module):
    def forward(self, chunks, labels):
        total = (labels != -100).sum()
        total = total if BROKEN else total.clamp_min(1)
        losses = [
            F.cross_entropy(logits.float().flatten(0, 1), part.flatten(), ignore_index=-100, reduction="sum")
            for logits, part in zip(chunks, labels.chunk(2, 1), strict=True)
        ]
        return sum(losses) / total  # <- fault


model, loss_fn = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)), ChunkedCrossEntropy()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(16):
    tokens = torch.randint(0, 20, (4, 8))
    labels = tokens.clone()
    labels[:, :3] = -100
    if step == 10:
        labels[:] = -100
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_fn(model(tokens).chunk(2, 1), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
