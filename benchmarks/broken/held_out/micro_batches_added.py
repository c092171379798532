"""Losses of micro-batches are means, and are added without a division by their number.

Source: https://github.com/huggingface/transformers/pull/35207
Cause: accumul
Remedy: divide
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


MICRO_BATCHES = 4
model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(40):
    optimizer.zero_grad()
    logged = 0.0
    for tokens in torch.randint(0, 20, (MICRO_BATCHES, 4, 8)):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        logged += loss.item() / MICRO_BATCHES
        loss = loss if BROKEN else loss / MICRO_BATCHES
        loss.backward()  # <- fault
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
