"""Small transformers with one fault of precision each, and the module that is at fault."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from torch import Tensor, nn

from castwise import Policy

CLASSES, TOKENS = 17, 8


class Norm(nn.Module):
    """RMS normalisation in the dtype of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.epsilon = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.sharpness = heads, 1.0
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) * (self.sharpness / math.sqrt(query.shape[-1]))
        mixed = scores.softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.up, self.gate, self.norm3 = nn.Linear(width, 2 * width), nn.Linear(2 * width, 2 * width), Norm(2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.norm3(self.gate(F.gelu(self.up(self.norm2(x))))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """A model, a batch, and a policy that finds the fault in it.

    Args:
        culprit: Name of the module at fault, or of the block that holds it.
    """

    model: Transformer
    batch: tuple[Tensor, Tensor]
    policy: Policy
    culprit: str

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


HEAD = {"head": "float32"}
BF16 = Policy(compute="bfloat16")
FP16 = Policy(compute="float16")


@torch.no_grad()
def huge_head(model: Transformer, draw: random.Random) -> tuple[str, Policy]:
    model.head.weight.mul_(draw.uniform(30, 100))
    return "head", BF16


@torch.no_grad()
def noisy_block(model: Transformer, draw: random.Random) -> tuple[str, Policy]:
    """The weights of a block are five times as large as those of others, and noise."""
    place, size = draw.randrange(len(model.blocks)), draw.uniform(0.3, 1.0)
    for param in model.blocks[place].parameters():
        if param.ndim > 1:
            param.add_(torch.randn_like(param) * size)
    return f"blocks.{place}", Policy(compute="bfloat16", modules=HEAD)


@torch.no_grad()
def narrow_softmax(model: Transformer, draw: random.Random) -> tuple[str, Policy]:
    """Attention has large scores in all blocks, and computes in fp32 in all but one."""
    place = draw.randrange(len(model.blocks))
    for block in model.blocks:
        attention: Any = block.attention
        attention.sharpness = draw.uniform(8, 16)
        attention.out.weight.mul_(draw.uniform(4, 8))
    others = [f"blocks.{other}.attention" for other in range(len(model.blocks)) if other != place]
    rules = dict.fromkeys([*others, "*.attention.qkv", "*.attention.out"], "float32")
    return f"blocks.{place}.attention", Policy(compute="bfloat16", modules={**rules, **HEAD})


@torch.no_grad()
def norm_without_epsilon(model: Transformer, draw: random.Random) -> tuple[str, Policy]:
    """The squares of what it normalises are zero in fp16."""
    block: Any = model.blocks[place := draw.randrange(len(model.blocks))]
    block.norm3.epsilon = 0.0
    for param in block.gate.parameters():
        param.mul_(draw.uniform(1e-4, 3e-4))
    return f"blocks.{place}.norm3", FP16


FAULTS: list[Callable[[Transformer, random.Random], tuple[str, Policy]]] = [
    huge_head,
    noisy_block,
    narrow_softmax,
    norm_without_epsilon,
]


def case(seed: int) -> Case:
    """Return a model with one of the faults, in turn, at a place and of a size that are drawn."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    heads = draw.choice([2, 4])
    model = Transformer(draw.choice([2, 3, 4]), 8 * heads * draw.choice([1, 2]), heads)
    culprit, policy = FAULTS[seed % len(FAULTS)](model, draw)
    tokens = torch.randint(CLASSES, (draw.choice([2, 4]), TOKENS + 1))
    return Case(model, (tokens[:, :-1], tokens[:, 1:]), policy, culprit)


def is_named(culprit: str, module: str) -> bool:
    """Return True if a module is the one at fault, or is in it."""
    return module == culprit or module.startswith(f"{culprit}.")


class FrozenEncoder(nn.Module):
    """A layer that runs without gradients, whose rounding matters all the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(8, 64), nn.Linear(64, 4)
        with torch.no_grad():
            self.encoder.bias += 300

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.encoder(x)
        return self.head(hidden - 300)  # type: ignore[no-any-return]
