"""All labels of a micro-batch are -100.

Source: https://github.com/OpenRLHF/OpenRLHF/pull/583
Cause: ignore
Remedy: ignore
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(16):
    tokens = torch.randint(0, 20, (4, 7))
    labels = tokens.clone()
    labels[:, :4] = -100  # the prompt
    if BROKEN and step == 6:
        labels[:] = -100  # a prompt that is longer than the context
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())  # <- fault
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
