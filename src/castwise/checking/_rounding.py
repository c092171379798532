"""`RandomRounding`: a mode that moves each result by up to one rounding, which shows what rounding does to a run."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import torch

from castwise._torch_private import TorchDispatchMode, schema_of, tree_map, without_dispatch_modes
from castwise.tracing._op_by_op import call_op

UNITS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The largest relative error of rounding to a dtype."""
_SPARE = 2**16  # random numbers beyond those of the largest tensor

# Ops that only move, choose or create values, and so round nothing. Names begin with one of these after "aten." and
# underscores.
_EXACT = (
    *("view", "reshape", "transpose", "permute", "slice", "select", "expand", "t.", "unsqueeze", "squeeze", "split"),
    *("detach", "alias", "clone", "empty", "zeros", "ones", "full", "new_", "arange", "lift", "masked_fill", "copy"),
    *("tril", "triu", "fill", "max_pool", "relu", "threshold", "neg", "abs", "sign", "embedding.", "rand", "normal"),
    *("bernoulli", "unbind", "cat", "stack", "constant_pad", "where", "chunk", "amax", "amin", "max.", "min.", "topk"),
    *("sort", "gather", "index.", "index_select", "as_strided", "pad", "reflection_pad", "replication_pad", "flip"),
    *(
        "roll",
        "repeat",
        "scatter.",
        "upsample_nearest",
        "foreach",
        "fused",
        "local_scalar",
        "scalar_tensor",
        "clamp",
    ),
    *("item", "unsafe_view", "lift_fresh", "floor", "ceil", "round", "trunc"),
)


class RandomRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Moves each element that an arithmetic op computes by up to one rounding of its dtype, at random.

    This is Monte Carlo arithmetic (Parker, 1997): the spread of several such runs estimates the rounding error of one.
    Ops in place are left alone, so that optimizers keep their exact state; `moved` moves the weights instead.

    Args:
        seed: Seed of the random numbers, which are not those of the program.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._seed, self._starts = seed, random.Random(seed)
        self._tables: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        self._rounds: dict[Any, bool] = {}
        self.dtypes: set[torch.dtype] = set()
        """Floating-point dtypes of the results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        result = call_op(func, args, kwargs or {})
        rounds = self._rounds.get(func)
        if rounds is None:
            rounds = self._rounds[func] = _is_rounding(func)
        if not rounds:
            return result
        return self.moved(result) if isinstance(result, torch.Tensor) else tree_map(self.moved, result)

    def moved(self, value: Any) -> Any:
        """Return a tensor with each element moved by up to one rounding; anything else as it is."""
        if not isinstance(value, torch.Tensor) or value.dtype not in UNITS or value.layout != torch.strided:
            return value
        if not value.numel() or value.device.type == "meta":
            return value
        if hasattr(value, "to_local"):
            return self._moved_shards(value)
        self.dtypes.add(value.dtype)
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        with without_dispatch_modes() if wide == torch.float64 else nullcontext():  # that of the promotion
            return value.to(wide).mul(self._factors(value, wide)).to(value.dtype)

    def _moved_shards(self, value: Any) -> Any:
        """Return a DTensor with each element moved; replicas move alike if all ranks have drawn as often."""
        layout = {"shape": value.shape, "stride": value.stride(), "run_check": False}
        return type(value).from_local(self.moved(value.to_local()), value.device_mesh, value.placements, **layout)

    def _factors(self, value: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        """Return random numbers around 1: a random part of a table, which is far faster than to draw them."""
        key, count = (value.device, value.dtype), value.numel()
        table = self._tables.get(key)
        if table is None or table.numel() < count + _SPARE:
            generator = torch.Generator(value.device).manual_seed(self._seed)
            table = torch.empty(count + 2 * _SPARE, dtype=wide, device=value.device)
            # A step in the same dtype is rounded back to nothing half of the time unless it is twice as large.
            unit = UNITS[value.dtype] * (2 if wide == value.dtype else 1)
            self._tables[key] = table.uniform_(-1, 1, generator=generator).mul_(unit).add_(1)
        start = self._starts.randrange(table.numel() - count + 1)
        return table[start : start + count].view(value.shape)


def _is_rounding(func: Any) -> bool:
    schema = schema_of(func)
    if schema is None or schema.is_mutable or getattr(func, "is_view", False):
        return False
    name = str(func).partition(".")[2].lstrip("_")
    return not name.startswith(_EXACT)
