"""`JointReplay`: ranks that hold a part of a model each agree on faults, and gather the weights for a replay."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from castwise._registered_hooks import hooks_of
from castwise._torch_private import fsdp_mixed_precision
from castwise._warnings import warn_or_print
from castwise.monitor._exchange import Exchange, NoExchangeError
from castwise.monitor._local_shards import is_split, is_split_over_ranks
from castwise.policy._casting import cast_floats

_MOST_OF_FREE = 0.25  # of the memory that is free, for the parts of the other ranks
_MOST_BYTES = 2**30  # where it is not known how much is free


class JointReplay:
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

    def any(self, one: bool, other: bool = False) -> tuple[bool, bool]:
        """Return for each flag whether it is set on any rank; this rank's own ones once ranks do not meet any more.

        All ranks call this at the same steps.
        """
        self._steps += 1
        numbers = torch.tensor([one, other], dtype=torch.uint8)
        if self._exchange is not None:
            try:
                self._exchange.maximum_of_step(self._steps, numbers)
            except NoExchangeError as why:
                self._exchange = None
                text = f"batches of this model, which is split over ranks, are not replayed any more: {why}"
                warn_or_print(text, RuntimeWarning)
        one, other = map(bool, numbers.tolist())
        return one, other

    @contextmanager
    def gathered(self, is_wanted: bool) -> Iterator[bool]:
        """Give the modules all of their weights within the context, if any rank wants that and all have the memory.

        No collectives run inside, also where the model's own forward has some to gather weights.

        Yields:
            Whether the modules have them.
        """
        wanted, lacks_memory = self.any(is_wanted, not self._has_memory())
        if self._exchange is None or not wanted or lacks_memory:
            yield False
            return
        with _gathered(self._model):
            yield True

    def close(self) -> None:
        """Leave the other ranks, which go on without."""
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None

    def _has_memory(self) -> bool:
        params = [param for param in self._model.parameters() if is_split(param)]
        nbytes = sum(param.numel() * param.element_size() for param in params)
        free = _free_bytes(params[0].device) if params else None
        return nbytes <= (_MOST_BYTES if free is None else _MOST_OF_FREE * free)


def can_be_replayed(model: nn.Module) -> bool:
    """Return True if each rank can replay a batch of the model, alone or with the weights of all ranks gathered."""
    return not is_split_over_ranks(model) or can_be_gathered(model)


def can_be_gathered(model: nn.Module) -> bool:
    """Return True if what is split of a model over ranks are parameters, and each by `fully_shard` alone.

    Not with tensor parallelism, whose ops have collectives of their own, nor with FSDP1 or SyncBatchNorm.
    """
    units = _units(model)
    of_units = {id(param) for unit in units for param in unit.parameters()}
    split = [param for param in model.parameters() if is_split(param)]
    return (
        bool(units)
        and all(id(param) in of_units and _is_sharded_once(param) for param in split)
        and not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    )


def _is_sharded_once(param: Any) -> bool:
    """Return True for FSDP2, also with replicas (HSDP): the last dimension of the mesh is sharded and no other."""
    *others, last = param.placements
    return last.is_shard() and all(placement.is_replicate() for placement in others)


def _units(model: nn.Module) -> list[Any]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # a program that shards a module has imported it
    kind = getattr(fsdp, "FSDPModule", ())
    return [module for module in model.modules() if isinstance(module, kind)]


@contextmanager
def _gathered(model: nn.Module) -> Iterator[None]:
    units = _units(model)
    split = [unit for unit in units if any(is_split(param) for param in unit.parameters())]
    for unit in split:
        unit.unshard()
    try:
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(_without_its_hooks(unit))
            yield
    finally:
        for unit in split:
            unit.reshard()


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
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp") or type(
        getattr(hook, "__self__", None)
    ).__module__.startswith("torch.distributed.fsdp")


def _free_bytes(device: torch.device) -> float | None:
    """Return the free bytes of a device's memory; None if they are not known."""
    if device.type == "cpu":
        names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
        known = "SC_AVPHYS_PAGES" in names and "SC_PAGE_SIZE" in names
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) if known else None
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if ask is None else float(ask(device)[0])
