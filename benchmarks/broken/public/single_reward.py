"""Rewards are divided by their standard deviation, and a group has one.

Source: https://github.com/Tencent-Hunyuan/UniRL/issues/330
Cause: aten.std
Remedy: correction=0
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


def advantages(rewards):
    std = rewards.std() if BROKEN else rewards.std(correction=0)  # <- fault
    return (rewards - rewards.mean()) / (std + 1e-4)


policy = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
for step in range(16):
    tokens = torch.randint(0, 20, (1 if step == 13 else 4, 6))
    with torch.autocast("cpu", torch.bfloat16):
        logits = policy(tokens)
    log_probs = logits.float().log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2).sum(1)
    loss = -(log_probs * advantages(torch.rand(len(tokens)))).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
