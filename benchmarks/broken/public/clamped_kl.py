"""A divergence is clamped after its exponential, so its gradient is 0 times inf.

Source: https://github.com/OpenRLHF/OpenRLHF/pull/1335
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
    tokens = torch.randint(0, 20, (4, 6))
    with torch.autocast("cpu", torch.bfloat16):
        logits = policy(tokens)
    now = logits.float().log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
    base = now.detach() + 0.1 * torch.randn(4, 6)
    if step == 8:
        base[1, 2] = 120.0
    apart = base - now
    kl = ((apart if BROKEN else apart.clamp(max=20)).exp() - 1 - apart).clamp(-10, 10)  # <- fault
    loss = kl.mean() - now.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
