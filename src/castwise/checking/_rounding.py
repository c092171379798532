"""`RandomRounding`: a mode that moves each result by up to one rounding, which shows what rounding does to a run."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch

from castwise._torch_private import TorchDispatchMode, schema_of, tree_map
from castwise.tracing._op_by_op import call_op, called_directly

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
    *("item", "unsafe_view", "unsafe_split", "lift_fresh", "floor", "ceil", "round", "trunc"),
)


@called_directly
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
        self.dtypes: set[torch.dtype] = set()
        """Floating-point dtypes of the results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        kwargs = kwargs or {}
        return self.moved(call_op(func, args, kwargs)) if _is_rounding(func) else func(*args, **kwargs)

    def of_op(self, func: Any, result: Any) -> Any:
        """Return what an op has returned, moved if the op rounds."""
        return self.moved(result) if _is_rounding(func) else result

    def moved(self, value: Any) -> Any:
        """Return tensors with each element moved by up to one rounding: where possible, they are changed in place.

        Args:
            value: What an op has returned, or a weight.
        """
        return self._moved(value) if isinstance(value, torch.Tensor) else tree_map(self._moved, value)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in UNITS or value.layout != torch.strided:
            return value
        if value.is_meta or not value.numel():
            return value
        if hasattr(value, "to_local"):
            return self._moved_shards(value)
        self.dtypes.add(value.dtype)
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        factors = self._factors(value, wide)
        if not value.is_contiguous():  # which may have elements that are one number in memory
            return value.to(wide).mul(factors).to(value.dtype)
        return value.mul_(factors) if value.dtype == wide else value.to(wide).mul_(factors).to(value.dtype)

    def _moved_shards(self, value: Any) -> Any:
        """Return a DTensor with each element moved; replicas move alike if all ranks have drawn as often."""
        layout = {"shape": value.shape, "stride": value.stride(), "run_check": False}
        return type(value).from_local(self._moved(value.to_local()), value.device_mesh, value.placements, **layout)

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
        if value.is_contiguous():
            return table.as_strided(value.shape, value.stride(), start)  # half the time of a slice and a view
        return table[start : start + count].view(value.shape)


@functools.cache
def _is_rounding(func: Any) -> bool:
    schema = schema_of(func)
    if schema is None or schema.is_mutable or getattr(func, "is_view", False):
        return False
    name = str(func).partition(".")[2].lstrip("_")
    return not name.startswith(_EXACT)
