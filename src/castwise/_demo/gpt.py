"""A byte-level GPT, kept simple because the demo is about precision. Without dropout, training draws no numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from torch import Tensor, nn

BYTES = 256


@dataclass(frozen=True)
class Size:
    """The size of the model and its batches.

    Args:
        layers: Number of transformer blocks.
        heads: Attention heads per block; divides `width`.
        width: Features per token.
        context: Tokens (bytes) per sequence.
        batch: Sequences per step.
    """

    layers: int
    heads: int
    width: int
    context: int
    batch: int

    @property
    def tokens(self) -> int:
        """Number of tokens per step."""
        return self.batch * self.context


SIZES = {
    "tiny": Size(layers=2, heads=4, width=256, context=128, batch=8),
    "small": Size(layers=6, heads=8, width=384, context=256, batch=16),
}

# For a precision that the CPU emulates, in which a step of `tiny` would take seconds.
EMULATED = Size(layers=1, heads=2, width=32, context=64, batch=4)


class Block(nn.Module):
    """Causal self-attention and an MLP, each with pre-normalisation and a residual connection, as in GPT-2."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.projection = nn.Linear(size.width, size.width)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map features of shape (batch, context, width) to features of the same shape."""
        x = x + self._attention(self.norm_attention(x))
        mlp: Tensor = self.mlp(self.norm_mlp(x))
        return x + mlp

    def _attention(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return projected


class GPT(nn.Module):
    """A GPT that predicts the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTES)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, context), int64, to logits (batch, context, 256)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.blocks(self.token(tokens) + self.position(positions))
        logits: Tensor = self.head(self.norm(features))
        return logits


def example() -> tuple[GPT, Tensor]:
    """Return a model of size "tiny" and tokens for it: the default of `castwise trace`."""
    size = SIZES["tiny"]
    torch.manual_seed(0)
    return GPT(size), torch.randint(BYTES, (size.batch, size.context))


def task() -> tuple[GPT, list[tuple[Tensor, Tensor]], Callable[[Tensor, Tensor], Tensor]]:
    """Return a model of size "tiny", batches and a loss: the default of `castwise compare` and `castwise tune`."""
    model, size = example()[0], SIZES["tiny"]
    tokens = torch.randint(BYTES, (4, size.batch, size.context + 1))
    return model, [(text[:, :-1], text[:, 1:]) for text in tokens], loss


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte of logits (batch, context, 256) and bytes (batch, context)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    """Initialise weights as in GPT-2; with torch's defaults, the first loss is far above ln 256."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
