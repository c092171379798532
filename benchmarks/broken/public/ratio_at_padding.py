"""A ratio of probabilities overflows at padding, which the mask hides from the loss alone.

Source: https://github.com/MakazhanAlpamys/Soup/issues/342
Cause: gradient of aten.exp
Remedy: clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


policy = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
for step in range(16):
    tokens, advantage, mask = torch.randint(0, 20, (4, 6)), torch.randn(4, 1), torch.ones(4, 6)
    mask[:, 4:] = 0
    with torch.autocast("cpu", torch.bfloat16):
        logits = policy(tokens)
    log_probs = logits.float().log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
    old = log_probs.detach() + 0.01 * torch.randn(4, 6)
    if step == 7:
        old[:, 4:] = -200.0  # what the sampler has left at padding
    log_ratio = log_probs - old
    ratio = torch.exp(log_ratio if BROKEN else log_ratio.clamp(-20, 20))  # <- fault
    objective = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    loss = -(torch.where(mask > 0, objective, torch.zeros_like(objective)).sum(1) / mask.sum(1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
