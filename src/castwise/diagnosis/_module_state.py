"""`ModuleState`: what modules keep in attributes that are no parameters or buffers, and a forward may change."""

from __future__ import annotations

import io
import operator
import queue
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_OF_MODULE = frozenset(vars(nn.Module()))
_DEEPEST, _MOST = 3, 10_000  # containers in containers, and what all of them hold
_QUEUES = (queue.Queue, queue.SimpleQueue)


class UnrepeatableError(RuntimeError):
    """A forward that cannot be repeated without a trace."""


class ModuleState:
    """The plain attributes of a model's modules: numbers, containers, generators of random numbers.

    The contents of other objects are not included, such as those of caches of other libraries.

    Args:
        model: The model.

    Raises:
        UnrepeatableError: An attribute is an iterator or a queue, which a forward may use up.
    """

    def __init__(self, model: nn.Module) -> None:
        self._left = _MOST
        self.tensors: list[torch.Tensor] = []
        """Tensors among the attributes, whose values are not kept here."""
        self._put_back: list[Callable[[], object]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                own = {key: value for key, value in vars(module).items() if key not in _OF_MODULE}
                self._attributes.append((vars(module), own))
                for key, value in own.items():
                    self._keep(f"{name}.{key}" if name else key, value, 0)

    def _keep(self, name: str, value: Any, depth: int) -> None:
        self._left -= 1
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, (list, dict, set, deque)):
            if depth < _DEEPEST and len(value) <= self._left:
                self._put_back.append(_contents_of(value))
                for each in value.values() if isinstance(value, dict) else value:
                    self._keep(name, each, depth + 1)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._put_back.append(lambda: value.set_state(state))
        elif isinstance(value, random.Random):
            numbers = value.getstate()
            self._put_back.append(lambda: value.setstate(numbers))
        elif hasattr(type(value), "bit_generator"):  # of numpy
            bits, of_bits = value.bit_generator, value.bit_generator.state
            self._put_back.append(lambda: setattr(bits, "state", of_bits))
        elif isinstance(value, (Iterator, *_QUEUES)) and not isinstance(value, io.IOBase):
            raise UnrepeatableError(f"the forward may use up {name}, which is a {type(value).__name__}")

    def restore(self) -> None:
        """Give all attributes their values, and containers and generators their contents."""
        for attributes, own in self._attributes:
            for key in [key for key in attributes if key not in _OF_MODULE and key not in own]:
                del attributes[key]
            attributes.update(own)
        for put_back in self._put_back:
            put_back()


def _contents_of(value: Any) -> Callable[[], object]:
    contents: Any = dict(value) if isinstance(value, dict) else list(value)

    def put_back() -> None:
        if len(value) != len(contents) or not _is_same(value, contents):
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(contents)

    return put_back


def _is_same(value: Any, contents: Any) -> bool:
    """Return True if two containers hold the same objects in the same order."""
    keys = all(a is b for a, b in zip(value, contents, strict=True))
    return keys and (not isinstance(value, dict) or all(map(operator.is_, value.values(), contents.values())))
