"""The load of experts is averaged in fp16 over so many tokens that their number is inf: the auxiliary loss is 0.

Source: https://github.com/huggingface/transformers/pull/43543
Cause: aten.sum
Remedy: fp32
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


EXPERTS, TOKENS = 4, 70_000


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(8, 2) for _ in range(EXPERTS))

    def forward(self, x):
        scores = self.router(x)
        gates = scores.softmax(-1)
        return sum(gates[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)), scores


def balance(scores, mask):
    probabilities = (scores if BROKEN else scores.float()).softmax(-1)
    mask = mask[:, None].to(probabilities.dtype)
    chosen = F.one_hot(probabilities.argmax(-1), EXPERTS).float().mean(0)
    average = (probabilities * mask).sum(0) / mask.sum(0)  # <- fault
    return EXPERTS * (chosen * average.float()).sum()


model = Experts()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(16):
    x, y, mask = torch.randn(TOKENS, 8), torch.randint(0, 2, (TOKENS,)), torch.ones(TOKENS)
    with torch.autocast("cpu", torch.float16):
        logits, scores = model(x)
    loss = F.cross_entropy(logits.float(), y) + 0.01 * balance(scores, mask)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
