"""Small training programs with switches: what they compute, how they compute it, and how precisely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WORDS, WIDTH = 40, 16
Probe = Callable[[str, torch.Tensor], None]


class Block(nn.Module):
    def __init__(self, eps: float = 1e-5, gelu: str = "none", is_low: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gelu, self.is_low, self.dropout = gelu, is_low, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(functional.gelu(self.up(self.norm(x)), approximate=self.gelu))
        if self.is_low:
            y = y.bfloat16().float()
        return x + functional.dropout(y, self.dropout)


class Model(nn.Module):
    def __init__(self, second: dict[str, Any], dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout=dropout), Block(**{"dropout": dropout, **second})])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(
    *,
    second: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    scale: float | None = None,
    halves: bool = False,
    clip: float = 1.0,
    clips_by_hand: bool = False,
    steps: int = 2,
    seed: int = 0,
    loss_bug: float = 0.0,
    dropout: float = 0.1,
    logits: Probe | None = None,
    **adam: Any,
) -> None:
    """Train on random words. The switches that change nothing but rounding: `halves`, `clips_by_hand`, `fused`."""
    torch.manual_seed(seed)
    model = Model(second or {}, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **adam})
    scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0)
    data = torch.Generator().manual_seed(seed + 1)
    for _ in range(steps):
        words = torch.randint(0, WORDS, (4, 8), generator=data)
        optimizer.zero_grad()
        for part in words.chunk(2 if halves else 1):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                out = model(part)
            loss = (
                functional.cross_entropy(out.float().view(-1, WORDS), part.roll(1, 1).reshape(-1), reduction="sum") / 32
            )
            scaler.scale(loss + loss_bug * out.float().square().mean()).backward()
        if logits is not None:
            logits("logits", out)
        scaler.unscale_(optimizer)
        if clips_by_hand:
            norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
            for p in model.parameters():
                p.grad.mul_((clip / (norm + 1e-6)).clamp(max=1.0))
        else:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


def program(**switches: Any) -> Callable[[], None]:
    return lambda: train(**switches)
