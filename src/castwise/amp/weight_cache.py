"""`WeightCache`: low-precision copies of weights that outlive an autocast region, made again only after a change.

Autocast casts a weight at its first use in each region, and one that is frozen, or under `inference_mode`, at every
use. A region that is given a cache runs under a `TorchFunctionMode` that looks at the calls of the ops which run in low
precision and puts copies in the place of weights; what such an op does with them is what autocast does with its own
casts. Three facts shaped the code:

* A weight has changed if its version or its memory has; a fused optimizer bumps no version, so optimizer steps are
  watched. An alias keeps the memory of a weight alive, so that other memory cannot come to have its address.
* A copy that a backward has saved must not be overwritten: it is made anew elsewhere, as autocast would.
  Each region gives a weight one node of the graph, so that gradients of several uses add up as in torch.
* Where a copy might be wrong, the call goes through untouched, and autocast casts: subclasses and sharded weights,
  views, compiled and transformed functions.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from castwise._torch_private import (
    are_functorch_transforms_active,
    holders_of,
    is_fsdp_flattened,
    is_gathered_by_fsdp,
    version,
)
from castwise.amp.checks import integer

# Ops that autocast runs in low precision on every type of device, under all their names.
_NAMES = ("mm", "bmm", "matmul", "addmm", "baddbmm", "prelu")
LOW_PRECISION_OPS = frozenset(
    [
        nn.functional.linear,
        *(getattr(torch, f"conv{transposed}{n}d") for transposed in ("", "_transpose") for n in (1, 2, 3)),
        *(getattr(torch, name) for name in _NAMES),
        *(getattr(torch.Tensor, name) for name in (*_NAMES, "__matmul__", "__rmatmul__")),
    ]
)
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class WeightCacheReport(NamedTuple):
    """What a cache holds and did.

    Args:
        cached: Qualified names of the weights it holds a copy of.
        nbytes: Bytes of all copies.
        hits: Uses of a copy that was there.
        refreshes: Copies made, the first ones included.
        refused: By qualified name why a weight is never cached.
    """

    cached: list[str]
    nbytes: int
    hits: int
    refreshes: int
    refused: dict[str, str]


class _Stamp(NamedTuple):
    """What changes with a weight, as far as can be seen."""

    version: int
    address: int
    steps: int


class _Place:
    """A parameter of a module."""

    def __init__(self, module: nn.Module, name: str, on_end: Callable[[object], None]) -> None:
        self._module, self._name = weakref.ref(module, on_end), name

    def is_at(self, module: nn.Module, name: str) -> bool:
        return self._module() is module and self._name == name

    def weight(self) -> torch.Tensor | None:
        module = self._module()
        return None if module is None else module._parameters.get(self._name)


class _Copy:
    """A weight's copy in one dtype."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self.buffer = _like(weight, dtype)
        self._holders = holders_of(self.buffer)
        self.stamp: _Stamp | None = None
        self._alias: torch.Tensor | None = None

    def is_like(self, weight: torch.Tensor) -> bool:
        """Say whether a copy of the weight would lie in memory as this one does."""
        return self.buffer.shape == weight.shape and self.buffer.stride() == weight.stride()

    def refresh(self, weight: torch.Tensor, stamp: _Stamp) -> None:
        """Make the copy anew: elsewhere if a backward that is to come has saved it."""
        if holders_of(self.buffer) > self._holders:
            self.buffer = _like(weight, self.buffer.dtype)
        with torch.no_grad():
            self._alias = weight.detach()
            self.buffer.copy_(self._alias)
        self.stamp = stamp


def _like(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():  # what inference mode makes cannot be saved for a backward
        return torch.empty_like(weight, dtype=dtype)


class _Cast(torch.autograd.Function):
    """The cast of a weight to a copy that is there already. Autograd casts its gradient back, as it does any."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class WeightCache:
    """Copies of a model's fp32 weights in bf16 or fp16, for `castwise.autocast(..., weight_cache=cache)`.

    Outputs and gradients are bit for bit those of the region without it. A copy is made at the first use of a weight
    and again after it has changed: by an optimizer's step, in place, or by another tensor in its place. Writes through
    `.data`, which leave no trace, are not seen: call `invalidate()` after them, or look for them with `verify=True`.

    Copies take half of the bytes of the weights they are of, and are freed with them. Only plain dense fp32 parameters
    are cached, in linear layers, convolutions and matrix products; `report()` says which are not, and why. In code that
    is compiled or transformed by `torch.func` the cache steps aside. (With `torch._inductor.config.freezing` inductor
    hoists the casts of inference itself, for weights that do not change any more; otherwise compiled code casts in
    every call.) Threads may share it.

    Args:
        model: Whose parameters are cached, also ones that it gets later.
        budget_bytes: How many bytes of copies to hold, the least recently used go first; None for all.
        verify: Compare a copy with its weight at every use, which costs what the cache saves.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `budget_bytes` is below 0.

    Example:
        >>> import castwise
        >>> model = torch.nn.Linear(4, 4)
        >>> cache = WeightCache(model)
        >>> for _ in range(3):
        ...     with torch.no_grad(), castwise.autocast("cpu", dtype=torch.bfloat16, weight_cache=cache):
        ...         output = model(torch.ones(1, 4))
        >>> cache.report().hits, cache.report().refreshes
        (4, 2)
    """

    def __init__(self, model: nn.Module, *, budget_bytes: int | None = None, verify: bool = False) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if budget_bytes is not None and integer("budget_bytes", budget_bytes) < 0:
            raise ValueError(f"budget_bytes must be an integer >= 0 or None, got {budget_bytes!r}")
        if not isinstance(verify, bool):
            raise TypeError(f"verify must be a bool, got {verify!r}")
        self._model: Callable[[], nn.Module | None] = weakref.ref(model)
        self._budget, self._verify = budget_bytes, verify
        self._start()

    def _start(self) -> None:
        self._lock = threading.RLock()
        # By the id of a weight and the dtype of its copy, the least recently used first.
        self._copies: OrderedDict[tuple[int, torch.dtype], _Copy] = OrderedDict()
        # By the id of a weight where it is: torch.utils.swap_tensors refuses tensors with weak references.
        self._places: dict[int, _Place] = {}
        self._foreign: set[int] = set()  # ids of others; a weight that comes to have one of them is just not cached
        self._steps: dict[int, int] = {}
        self._nbytes = self._hits = self._refreshes = 0
        _CACHES.add(self)
        _watch_optimizers()

    def invalidate(self) -> None:
        """Make all copies again at their next use, as is needed after writes through `.data`."""
        with self._lock:
            for copy in self._copies.values():
                copy.stamp = None

    def report(self) -> WeightCacheReport:
        """Return what the cache holds and did."""
        model = self._model()
        named = [] if model is None else list(model.named_parameters())
        with self._lock:
            held = {key for key, _ in self._copies}
            return WeightCacheReport(
                cached=[name for name, weight in named if id(weight) in held],
                nbytes=self._nbytes,
                hits=self._hits,
                refreshes=self._refreshes,
                refused={name: reason for name, weight in named if (reason := _why_not(weight)) is not None},
            )

    def mode(self, device_type: str) -> TorchFunctionMode:
        """Return what a region enters.

        Args:
            device_type: The `type` of the device that the region is for.
        """
        return _Substitution(self, device_type)

    def copy_of(self, weight: torch.Tensor, dtype: torch.dtype) -> _Copy | None:
        """Return the copy of a weight as it is now, or None if it is not one of the model's or cannot be cached.

        Args:
            weight: An fp32 parameter of the model.
            dtype: Of the copy: `torch.float16` or `torch.bfloat16`.
        """
        key = id(weight)
        with self._lock:
            if not self._knows(weight):
                return None
            copy = self._copies.get((key, dtype))
            if copy is not None and not copy.is_like(weight):
                self._drop((key, dtype))
                copy = None
            if copy is None:
                nbytes = weight.numel() * dtype.itemsize
                if self._budget is not None and nbytes > self._budget:
                    return None
                copy = self._copies[key, dtype] = _Copy(weight, dtype)
                self._nbytes += nbytes
                self._keep_to_budget()
            elif self._budget is not None:
                self._copies.move_to_end((key, dtype))
            stamp = _Stamp(version(weight), weight.data_ptr(), self._steps.get(key, 0))
            if copy.stamp == stamp:
                self._hits += 1
                if self._verify:
                    self._compare(weight, copy)
            else:
                copy.refresh(weight, stamp)
                self._refreshes += 1
        return copy

    def _knows(self, weight: torch.Tensor) -> bool:
        """Say whether a weight is one of the model's that can be cached."""
        key = id(weight)
        place = self._places.get(key)
        if place is None or place.weight() is not weight:
            if place is not None:
                self._forget(key)
            if key in self._foreign or not self._find(weight):
                self._foreign.add(key)
                return False
        if _why_not(weight) is None:
            return True
        self._drop_all(key)  # from when it could be cached
        return False

    def _find(self, weight: torch.Tensor) -> bool:
        """Look for a weight that can be cached in the model, and note where it is."""
        model, key = self._model(), id(weight)
        if is_gathered_by_fsdp(weight):
            return False
        for module in () if model is None else model.modules():
            for name, param in module._parameters.items():
                if param is weight:
                    for before in [other for other, place in self._places.items() if place.is_at(module, name)]:
                        self._forget(before)  # it is not there any more
                    self._places[key] = _Place(module, name, lambda _: self._forget(key))
                    return True
        return False

    def _forget(self, key: int) -> None:
        with self._lock:
            self._places.pop(key, None)
            self._steps.pop(key, None)
            self._drop_all(key)

    def _drop_all(self, key: int) -> None:
        for dtype in _LOW_PRECISION:
            if (key, dtype) in self._copies:
                self._drop((key, dtype))

    def _drop(self, key: tuple[int, torch.dtype]) -> None:
        self._nbytes -= self._copies.pop(key).buffer.nbytes

    def _keep_to_budget(self) -> None:
        while self._budget is not None and self._nbytes > self._budget:
            self._drop(next(iter(self._copies)))

    def _compare(self, weight: torch.Tensor, copy: _Copy) -> None:
        with torch.no_grad():
            if torch.equal(weight.detach().to(copy.buffer.dtype).nan_to_num(), copy.buffer.nan_to_num()):
                return
        model = self._model()
        named = [] if model is None else model.named_parameters(remove_duplicate=False)
        names = [name for name, param in named if param is weight]
        raise RuntimeError(
            f"the weight {' = '.join(names)} was changed in a way that leaves no trace, such as a write through "
            ".data: call WeightCache.invalidate() after it"
        )

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        with self._lock:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if id(param) in self._places:
                        self._steps[id(param)] = self._steps.get(id(param), 0) + 1

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        model = self._model()
        twin = object.__new__(WeightCache)
        copied = model if model is None else memo.get(id(model), model)
        twin._model = (lambda: None) if copied is None else weakref.ref(copied)
        twin._budget, twin._verify = self._budget, self._verify
        twin._start()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model(), "budget_bytes": self._budget, "verify": self._verify}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # On what `object.__new__` has made: mypy fears a subclass with other arguments.
        self.__init__(state["model"], budget_bytes=state["budget_bytes"], verify=state["verify"])  # type: ignore[misc]


class _Substitution(TorchFunctionMode):
    """Puts copies in the place of weights while one region of one thread lasts."""

    def __init__(self, cache: WeightCache, device_type: str) -> None:
        TorchFunctionMode.__init__(self)
        self._cache, self._device_type = cache, device_type
        # Of this region: casts with a node of the graph, and the weights' stamps they are of.
        self._casts: dict[tuple[int, torch.dtype], tuple[torch.Tensor, _Stamp | None]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            not is_dynamo_compiling()
            and func in LOW_PRECISION_OPS
            and torch.is_autocast_enabled(self._device_type)
            and not are_functorch_transforms_active()
        ):
            dtype = torch.get_autocast_dtype(self._device_type)
            args = [self._low(arg, dtype) if type(arg) is nn.Parameter else arg for arg in args]
            kwargs = {name: self._low(arg, dtype) if type(arg) is nn.Parameter else arg for name, arg in kwargs.items()}
        return func(*args, **kwargs)

    def _low(self, weight: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        if weight.dtype is not torch.float32 or weight.device.type != self._device_type or dtype not in _LOW_PRECISION:
            return weight
        copy = self._cache.copy_of(weight, dtype)
        if copy is None:
            return weight
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return copy.buffer
        if not torch.is_autocast_cache_enabled():
            return self._cast(weight, copy)
        key = (id(weight), dtype)
        known = self._casts.get(key)
        if known is None or known[1] != copy.stamp:
            known = self._casts[key] = (self._cast(weight, copy), copy.stamp)
        return known[0]

    def _cast(self, weight: nn.Parameter, copy: _Copy) -> torch.Tensor:
        cast: torch.Tensor = _Cast.apply(weight, copy.buffer)  # type: ignore[no-untyped-call]  # torch's
        return cast


def _why_not(weight: torch.Tensor) -> str | None:
    """Say why a weight is not cached, if so."""
    if type(weight) is not nn.Parameter:
        return f"of the subclass {type(weight).__name__}"
    if weight.dtype is not torch.float32:
        return f"{weight.dtype} and not torch.float32"
    if weight.layout is not torch.strided or weight.device.type == "meta":
        return f"{weight.layout} on {weight.device.type}"
    if not (weight.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(weight)):
        return "not dense in memory"
    if weight.is_inference():
        return "made in inference mode, where no writes are counted"
    if is_fsdp_flattened(weight):
        return "managed by FullyShardedDataParallel"
    return None


_CACHES: weakref.WeakSet[WeightCache] = weakref.WeakSet()


def _tell_caches(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for cache in list(_CACHES):
        cache._stepped(optimizer)


@functools.cache
def _watch_optimizers() -> None:
    """Have every step of every optimizer told to all caches, from the first one on."""
    register_optimizer_step_post_hook(_tell_caches)
