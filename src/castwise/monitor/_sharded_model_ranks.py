"""`ShardedModelRanks`: ranks that hold a part of a model each agree on faults, and gather the weights for a replay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from castwise._registered_hooks import hooks_of
from castwise._torch_private import fsdp_mixed_precision, is_fsdp_flattened
from castwise._warnings import warn_or_print
from castwise.monitor._exchange import Exchange, NoExchangeError
from castwise.monitor._local_shards import fully_sharded, is_dtensor, is_split_over_ranks
from castwise.policy._casting import cast_floats

_MOST_OF_FREE = 0.25  # of the memory that is free, for the parts of the other ranks
_MOST_BYTES = 2**30  # where it is not known how much is free
_LIMIT = 600.0  # seconds that a rank waits for the others, as in collectives of the training itself
_FLAGS = 4
_FSDP = "torch.distributed.fsdp"


class ShardedModelRanks:
    """Gathers the weights of an FSDP2 model on each rank, so that each replays its batch alone.

    Ranks meet in an `Exchange`. If one does not come, or fails, nothing is replayed any more. Each rank says so once.

    Args:
        model: The model. All its parameters that are split are so by `fully_shard` alone; see `can_be_gathered`.

    Raises:
        NoExchangeError: Some ranks have not come.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._steps = model, 0
        self._exchange: Exchange | None = Exchange("replay", type(model).__name__)

    @property
    def is_over(self) -> bool:
        """Whether the ranks do not meet any more."""
        return self._exchange is None

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether it is set on any rank; this rank's own ones once ranks do not meet any more.

        All ranks call this at the same steps.

        Args:
            flags: At most four.
        """
        self._steps += 1
        return self._maximum(*flags)

    @contextmanager
    def gathered(self, is_wanted: bool) -> Iterator[bool]:
        """Give the modules all of their weights within the context, if any rank wants that and all have the memory.

        No collectives run inside, also where the model's own forward has some to gather weights. At the end, ranks wait
        for the slowest.

        Yields:
            Whether the modules have them.
        """
        wanted, lacks_memory = self.any(is_wanted, not self._has_memory())
        if self._exchange is None or not wanted or lacks_memory:
            yield False
            return
        try:
            with _gathered(self._model):
                yield True
        finally:
            self._maximum()

    def _maximum(self, *flags: bool) -> tuple[bool, ...]:
        # Of one size, so that ranks that are not where others are get wrong flags and no error that ends the process.
        numbers = torch.tensor([*flags, *[False] * (_FLAGS - len(flags))], dtype=torch.uint8)
        if self._exchange is not None:
            try:
                self._exchange.maximum_of_step(self._steps, numbers, _LIMIT)
            except NoExchangeError as why:
                self._exchange = None
                text = "batches of this model, which is split over ranks, are not replayed any more, nor steps skipped"
                warn_or_print(f"{text} without a scaler: {why}", RuntimeWarning)
        return tuple(map(bool, numbers.tolist()[: len(flags)]))

    def close(self) -> None:
        """Leave the other ranks, which go on without."""
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None

    def _has_memory(self) -> bool:
        params: list[Any] = [param for param in self._model.parameters() if is_dtensor(param)]
        nbytes = sum(param.numel() * param.element_size() for param in params)
        # The mesh has the device of the gathered weights, also where the parts are kept in the host's memory.
        free = _free_bytes(params[0].device_mesh.device_type) if params else None
        return float(nbytes) <= (_MOST_BYTES if free is None else _MOST_OF_FREE * free)


def can_be_replayed(model: nn.Module) -> bool:
    """Return True if each rank can replay a batch of the model, alone or with the weights of all ranks gathered.

    A replay may raise in the forward, which leaves hooks of FSDP half done, also on a single rank.
    """
    return can_be_gathered(model) if is_of_fsdp(model) else not is_split_over_ranks(model)


def is_of_fsdp(model: nn.Module) -> bool:
    """Return True if parts of a model are under FSDP, of either kind."""
    return bool(fully_sharded(model)) or any(map(is_fsdp_flattened, model.parameters()))


def can_be_gathered(model: nn.Module) -> bool:
    """Return True if a model is split over ranks, maybe a single one, and that by `fully_shard` alone.

    Not with tensor parallelism, whose ops have collectives of their own, nor with FSDP1 or SyncBatchNorm, nor where
    `register_fsdp_forward_method` has wrapped other methods than `forward`.
    """
    units = fully_sharded(model)
    of_units = {id(param) for unit in units for param in unit.parameters()}
    split = [param for param in model.parameters() if is_dtensor(param)]
    return (
        bool(units)
        and all(id(param) in of_units and _is_sharded_once(param) for param in split)
        and not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        and not any(_is_wrapped_by_fsdp(value) for unit in units for value in vars(unit).values())
    )


def _is_sharded_once(param: Any) -> bool:
    """Return True for FSDP2, also with replicas (HSDP): the last dimension of the mesh is sharded and no other."""
    *others, last = param.placements
    return last.is_shard() and all(placement.is_replicate() for placement in others)


def _is_wrapped_by_fsdp(value: Any) -> bool:
    function = getattr(value, "__func__", None)  # whose `__module__` is that of the method inside
    return str(getattr(function, "__globals__", {}).get("__name__", "")).startswith(_FSDP)


@contextmanager
def _gathered(model: nn.Module) -> Iterator[None]:
    units = fully_sharded(model)
    split = [unit for unit in units if any(is_dtensor(param) for param in _own_parameters(unit))]
    try:
        for unit in split:
            unit.unshard()
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(_without_its_hooks(unit))
            yield
    finally:
        for unit in split:
            unit.reshard()


def _own_parameters(unit: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters of a module that belong to no unit inside it."""
    inner = {id(param) for other in fully_sharded(unit) if other is not unit for param in other.parameters()}
    return (param for param in unit.parameters() if id(param) not in inner)


@contextmanager
def _without_its_hooks(unit: nn.Module) -> Iterator[None]:
    """Take off the hooks with which FSDP2 gathers weights and reduces gradients, and cast as they do."""
    tables: list[tuple[Any, dict[int, Any]]] = []
    policy, handles = fsdp_mixed_precision(unit), []
    for register in (unit.register_forward_pre_hook, unit.register_forward_hook):
        table: Any = hooks_of(register)
        tables.append((table, dict(table)))
        for key in [key for key, hook in table.items() if _is_of_fsdp(hook)]:
            del table[key]
    kind = next((param.device.type for param in unit.parameters()), "cpu")
    if policy is not None and policy.param_dtype is not None and policy.cast_forward_inputs:
        handles.append(
            unit.register_forward_pre_hook(
                lambda _, args, kwargs: (
                    cast_floats(args, kind, policy.param_dtype),
                    cast_floats(kwargs, kind, policy.param_dtype),
                ),
                with_kwargs=True,
            )
        )
    if policy is not None and policy.output_dtype is not None:
        handles.append(unit.register_forward_hook(lambda _, args, out: cast_floats(out, kind, policy.output_dtype)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for table, before in tables:
            table.clear()
            table.update(before)


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_FSDP)


def _free_bytes(device_type: str) -> float | None:
    """Return the free bytes of the current device's memory; None if they are not known."""
    if device_type == "cpu":
        names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
        known = "SC_AVPHYS_PAGES" in names and "SC_PAGE_SIZE" in names
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) if known else None
    ask = getattr(torch.get_device_module(device_type), "mem_get_info", None)
    return None if ask is None else float(ask()[0])
