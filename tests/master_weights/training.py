"""A small network, and how it is trained with fp32 weights and with 16-bit ones, on the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise import GradScaler, MasterWeights
from castwise.master_weights import _buckets as buckets

SMALL_BUCKETS = 4096  # bytes: the weights below are in several, and one is cut


@contextmanager
def buckets_of(nbytes: int) -> Iterator[None]:
    """Have `MasterWeights` that are made in the block step so many bytes of fp32 weights at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_BUCKET_BYTES", nbytes)
        yield


class Net(nn.Module):
    """Layers that autocast casts, norms and an embedding that it does not, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(20, 32)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.up, self.norm, self.down = nn.Linear(32, 101), nn.LayerNorm(101), nn.Linear(101, 32)
        self.head = nn.Linear(32, 20, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.down(nn.functional.gelu(self.norm(self.up(x))))
        return self.head(x)  # type: ignore[no-any-return]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(steps: int, start: int = 0) -> Iterator[torch.Tensor]:
    for step in range(start, start + steps):
        yield torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module,
    optimizer: Any,
    steps: int,
    *,
    start: int = 0,
    scaler: GradScaler | None = None,
    clip: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
    bad: Callable[[int], bool] = lambda step: False,
    after: Callable[[], object] = lambda: None,
) -> list[float]:
    """Train, and return the losses and norms."""
    numbers = []
    for step, batch in enumerate(batches(steps, start), start):
        with castwise.autocast("cpu", dtype=dtype):
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        numbers.append(loss.item())
        if bad(step):
            loss = loss * float("inf")
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            if clip is not None:
                numbers.append(scaler.clip_grad_norm_(optimizer, clip).item())
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        after()
    return numbers


def wrapped(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> tuple[Net, MasterWeights]:
    """Return a network and its optimizer, with small buckets."""
    model = net()
    with buckets_of(SMALL_BUCKETS):
        return model, MasterWeights(make(model.parameters()), model, **settings)


def same_bits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)
