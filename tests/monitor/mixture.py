"""A small transformer with mixtures of experts, in which faults can be planted, and the step that trains it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import castwise

WIDTH, HEADS, EXPERTS, BLOCKS, TOKENS, BATCH, CLASSES = 8, 2, 3, 2, 6, 2, 4


class Attention(nn.Module):
    """Causal, or with a row in which all is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.masked_row: int | None = None
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) * (key.shape[-1] ** -0.5 * self.gain)
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        if self.masked_row is not None:
            mask[self.masked_row] = -torch.inf
        mixed = self.dropout((scores + mask).softmax(-1)) @ value
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Each token goes to one of several MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(EXPERTS)
        )
        self.tokens_of = [0] * EXPERTS

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).float().softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            of_expert = chosen == place
            self.tokens_of[place] = int(of_expert.sum())
            if self.tokens_of[place]:
                out[of_expert] = (expert(x[of_expert]) * weights[of_expert, None]).to(out.dtype)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.moe = nn.LayerNorm(WIDTH), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.moe(self.norm2(x))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """From features (batch, tokens, width) to logits (batch, tokens, classes)."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            again = self.use_reentrant
            x = block(x) if again is None else checkpoint(block, x, use_reentrant=again)  # type: ignore[assignment]
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class _MultipliedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def with_multiplied_gradient(x: Tensor, factor: float = 1e30) -> Tensor:
    """Return `x`, whose gradient is multiplied."""
    return _MultipliedGradient.apply(x, factor)  # type: ignore[no-any-return, no-untyped-call]  # torch's


def linears(model: nn.Module) -> list[str]:
    """Names of the modules that compute in low precision."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def loss_of(logits: Tensor) -> Tensor:
    """Mean cross-entropy, every token being of the first class."""
    targets = torch.zeros(logits.shape[:-1], dtype=torch.long).flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets)


def batches() -> Iterator[Tensor]:
    while True:
        yield torch.randn(BATCH, TOKENS, WIDTH)


def trained(seed: int, steps: int, dtype: torch.dtype, use_reentrant: bool | None = None) -> tuple[Mixture, Any]:
    """Return a model and its scaler after some steps."""
    torch.manual_seed(seed)
    model = Mixture(use_reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = castwise.GradScaler("cpu", init_scale=2.0**8)
    for _, x in zip(range(steps), batches(), strict=False):
        optimizer.zero_grad()
        backward(model, x, dtype, scaler)
        scaler.step(optimizer)
        scaler.update()
    return model, scaler


def backward(model: nn.Module, x: Tensor, dtype: torch.dtype, scaler: Any) -> Tensor:
    """Run a forward and a backward as in training, and return the loss."""
    with castwise.autocast("cpu", dtype=dtype):
        loss = loss_of(model(x))
    scaler.scale(loss).backward()
    return loss.detach()


def is_finite(model: nn.Module, loss: Tensor) -> bool:
    """Return True if a loss and its gradients are finite."""
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    return all(bool(tensor.isfinite().all()) for tensor in [loss, *gradients])
