"""The k3 estimate of a KL divergence overflows once policy and reference are far apart.

Source: https://github.com/huggingface/trl/issues/3015
Cause: aten.exp
Remedy: clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


policy, reference = (nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)) for _ in range(2))
reference.requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)


def log_probs(model, tokens):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    return logits.float().log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2)


for step in range(16):
    tokens, advantage = torch.randint(0, 20, (4, 6)), torch.randn(4, 1)
    if step == 9:
        with torch.no_grad():
            policy[1].bias[tokens[0, 0]] = -150.0  # a token that the policy has unlearnt
    now, wanted = log_probs(policy, tokens), log_probs(reference, tokens)
    apart = wanted - now if BROKEN else (wanted - now).clamp(max=20)
    kl = torch.exp(apart) - apart - 1  # <- fault
    loss = (0.04 * kl - now * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
