"""`ForwardInputs`: keep what a forward reads besides the weights, so that it can be replayed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from castwise._torch_private import buffers_in, tree_map, version
from castwise.diagnosis._forward_state import CastingState, RandomState
from castwise.diagnosis._op_facts import tensors_of

LEARNED_FROM = 2
"""The number of first forwards that show which buffers a forward writes, and which random states it uses."""
_LOOKED_UP_EVERY = 64  # forwards after which the model's modules are walked again
_PLAIN = (int, float, bool, str, type(None))
_WITH_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)

Buffer = tuple[nn.Module, str]


@dataclass
class KeptInputs:
    """What one forward was given.

    Args:
        args: Positional arguments, detached; the tensors are the caller's, or copies.
        kwargs: Keyword arguments.
        casting: Autocast regions.
        random: Random state at the start of the forward.
        buffers: Module, name and value of each buffer that the forward may write to.
        versions: The tensors in the arguments, with their version counters.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    casting: CastingState
    random: RandomState
    buffers: list[tuple[nn.Module, str, torch.Tensor]]
    versions: list[tuple[torch.Tensor, int]]

    @property
    def are_changed(self) -> bool:
        """Whether a tensor was written to since, as far as torch counts writes: not through `.data` or numpy."""
        return any(version(tensor) != counted for tensor, counted in self.versions)

    @property
    def nbytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for tensor, _ in self.versions) + sum(copy.nbytes for _, _, copy in self.buffers)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Enter the autocast regions, after the random state and the buffers are as they were before the forward.

        The caller restores the present ones.
        """
        self.random.restore()
        for module, name, before in self.buffers:
            buffers_in(module)[name] = before.clone()
        for module in model.modules():
            if _keeps_statistics(module):
                _reset_nonfinite_statistics(module)
        with self.casting.applied():
            yield


class ForwardInputs:
    """Keeps the inputs of a model's forwards. Copies only what the forward changes, and syncs with no accelerator.

    The first forwards show what that is. Running statistics of batch norms are not copied: in training a forward does
    not read them.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._forwards = self._learned = 0
        self._written_buffers: list[Buffer] = []
        self._versions: list[int] = []  # of the buffers last copied
        self._written: set[Buffer] = set()
        self._uses_random = False  # that of Python or numpy
        self._device_types: set[str] = set()
        self.copies_tensors = False
        """Whether to copy the tensors in the arguments, because the script reuses their memory."""

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], most_bytes: float) -> KeptInputs:
        """Keep the inputs of a forward that is about to run.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            most_bytes: Limit for the copies of buffers; those above it are left out.
        """
        if self._forwards % _LOOKED_UP_EVERY == 0:
            self._look_up()
        self._forwards += 1
        detached = _copied if self.copies_tensors else _detached
        kept, kept_by_name = _mapped(detached, args), {name: _mapped(detached, value) for name, value in kwargs.items()}
        versions = [(tensor, version(tensor)) for tensor in _tensors(kept, kept_by_name)]
        types = self._device_types.union(tensor.device.type for tensor, _ in versions)
        random_ = RandomState(outside_torch=self._uses_random or self._learned < LEARNED_FROM)
        return KeptInputs(kept, kept_by_name, CastingState(types), random_, self._copies(most_bytes), versions)

    def learn(self, kept: KeptInputs) -> None:
        """Note what a forward has changed, after one of the first."""
        if self._learned == LEARNED_FROM:
            return
        self._learned += 1
        written = {
            (module, name)
            for (module, name, before), counted in zip(kept.buffers, self._versions, strict=True)
            if _is_written(buffers_in(module).get(name), before, counted)
        }
        self._written |= written
        self._uses_random |= not kept.random.is_current_outside_torch()
        if self._learned == LEARNED_FROM:
            self._written_buffers = [buffer for buffer in self._written_buffers if buffer in self._written]

    def _look_up(self) -> None:
        self._device_types = {param.device.type for param in self._model.parameters()}
        self._written_buffers = [
            (module, name)
            for module in self._model.modules()
            if not (isinstance(module, torch.jit.ScriptModule) or _keeps_statistics(module))
            for name in buffers_in(module)
            if self._learned < LEARNED_FROM or (module, name) in self._written
        ]

    def _copies(self, most_bytes: float) -> list[tuple[nn.Module, str, torch.Tensor]]:
        copies, versions = [], []
        for module, name in self._written_buffers:
            buffer = buffers_in(module).get(name)
            if buffer is not None and buffer.nbytes <= most_bytes:
                most_bytes -= buffer.nbytes
                copies.append((module, name, buffer.detach().clone()))
                versions.append(version(buffer))
        self._versions = versions
        return copies


def _keeps_statistics(module: nn.Module) -> bool:
    """Return True for a batch norm that normalizes with the batch's statistics, and only updates the running ones."""
    return isinstance(module, _WITH_STATISTICS) and module.training and module.track_running_stats


def _reset_nonfinite_statistics(module: nn.Module) -> None:
    """Replace running statistics that the batch has spoilt, so that they are not blamed."""
    for name, buffer in buffers_in(module).items():
        if buffer is not None and buffer.is_floating_point() and not buffer.isfinite().all():
            buffers_in(module)[name] = torch.zeros_like(buffer)


def _is_written(buffer: torch.Tensor | None, before: torch.Tensor, counted: int) -> bool:
    if buffer is None or buffer.shape != before.shape or buffer.dtype != before.dtype or version(buffer) != counted:
        return True
    if buffer.device.type != "cpu":  # a comparison would wait
        return False
    return not ((buffer == before) | (buffer.isnan() & before.isnan())).all()


def _mapped(function: Any, value: Any) -> Any:
    """Apply a function to the tensors in a value; torch's `tree_map` takes several times as long for simple values."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)([_mapped(function, item) for item in value])
    if type(value) is dict:
        return {key: _mapped(function, item) for key, item in value.items()}
    return value if isinstance(value, _PLAIN) else tree_map(function, value)


def _tensors(*values: Any) -> list[torch.Tensor]:
    tensors: dict[torch.Tensor, None] = {}
    for value in values:
        leaves = itertools.chain(value.values() if type(value) is dict else value)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                tensors[leaf] = None
            elif not isinstance(leaf, _PLAIN):
                tensors.update(dict.fromkeys(tensors_of(leaf)))
    return list(tensors)


def _detached(value: Any) -> Any:
    """Return a detached tensor with the same memory, so that its graph is not kept alive."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _copied(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
