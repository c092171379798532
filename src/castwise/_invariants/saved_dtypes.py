"""`dtype-of-checkpoint`: what is saved has the dtype of what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from castwise._invariants.invariant import Violation, named

_WRAPPERS = ("module.", "model.", "_")  # the last one of compiled modules
_MOST, _DEEPEST = 200_000, 6


class SavedDtypes:
    """Compares the tensors of files with the parameters of their names, as they were in the last step.

    Args:
        parameters: Returns the model's parameters by name.
    """

    def __init__(self, parameters: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._parameters = parameters
        self._trained: dict[str, torch.dtype] = {}
        self._narrow: dict[str, torch.dtype] = {}
        self._has_full = self._has_optimizer = self._is_converted = False

    def saved(self, saved: object) -> None:
        """Look at an object that is about to be written to a file."""
        if not self._trained:
            return
        now = {name: param.dtype for name, param in self._parameters().items()}
        for key, tensor in _tensors(saved):
            name = next((name for name in _without_wrappers(key) if name in self._trained), None)
            if name is None or not tensor.is_floating_point():
                continue
            if tensor.dtype.itemsize < self._trained[name].itemsize:
                self._narrow[name] = tensor.dtype
                self._is_converted |= now.get(name) == tensor.dtype
            else:
                self._has_full = True
        self._has_optimizer |= _has_optimizer(saved)

    def stepping(self, step: int, *, is_noted: bool) -> Iterator[Violation]:
        """Judge what was saved since the last step; with `is_noted`, note the dtypes that are trained."""
        if self._narrow:
            yield from self._judged(step)
        self._narrow, self._has_full, self._has_optimizer, self._is_converted = {}, False, False, False
        if is_noted or not self._trained:
            self._trained = {
                name: param.dtype for name, param in self._parameters().items() if param.is_floating_point()
            }

    def _judged(self, step: int) -> Iterator[Violation]:
        names, (dtype, *_) = tuple(self._narrow), self._narrow.values()
        trained = self._trained[names[0]]
        what = (
            f"before step {step:,}, weights trained in {_short(trained)} were saved in {_short(dtype)} ({named(names)})"
        )
        if self._is_converted:
            text = f"{what}: the model itself was converted, and training continues from rounded weights."
            yield Violation("dtype-of-checkpoint", text, "Convert a copy: copy.deepcopy(model).", parameters=names)
        elif self._has_optimizer and not self._has_full:
            text = f"{what}, together with the optimizer: a run that resumes continues from rounded weights."
            yield Violation("dtype-of-checkpoint", text, "Save model.state_dict() as it is.", parameters=names)


def _tensors(value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in mappings, with their keys."""
    waiting: list[tuple[object, int]] = [(value, 0)]
    for _ in range(_MOST):
        if not waiting:
            return
        found, depth = waiting.pop()
        if isinstance(found, torch.nn.Module):
            found = dict(found.named_parameters())
        items = found.items() if isinstance(found, Mapping) else ()
        for key, item in items:
            if isinstance(item, torch.Tensor) and isinstance(key, str):
                yield key, item
            elif isinstance(item, (Mapping, torch.nn.Module)) and depth < _DEEPEST:
                waiting.append((item, depth + 1))


def _has_optimizer(value: object, depth: int = 0) -> bool:
    if not isinstance(value, Mapping) or depth > _DEEPEST:
        return False
    if "param_groups" in value and "state" in value:
        return True
    return any(_has_optimizer(item, depth + 1) for item in value.values() if isinstance(item, Mapping))


def _without_wrappers(key: str) -> Iterator[str]:
    """Yield a key, and what is left of it without the prefixes of wrappers, one after the other."""
    yield key
    while key.startswith(_WRAPPERS) and "." in key:
        key = key.partition(".")[2]
        yield key


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
