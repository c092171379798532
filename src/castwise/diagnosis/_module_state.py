"""`ModuleState`: what modules keep in attributes that are no parameters or buffers, and a forward may change."""

from __future__ import annotations

import functools
import io
import operator
import queue
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from castwise._registered_hooks import without

_OF_MODULE = frozenset(vars(nn.Module()))
_DEEPEST, _MOST = 3, 10_000  # containers in containers, and what all of them hold
_QUEUES = (queue.Queue, queue.SimpleQueue)
_OF_BACKWARD = [name for name, value in vars(nn.Module()).items() if "backward" in name and isinstance(value, dict)]
# Of the standard library, by module and class. In C, and so not among them: `queue.SimpleQueue`.
_SHARED = {
    ("queue", "Queue"): ("get", "put"),
    ("multiprocessing.queues", "Queue"): ("get", "put"),
    ("multiprocessing.connection", "Connection"): ("recv", "recv_bytes", "send", "send_bytes"),
}


class UnrepeatableError(RuntimeError):
    """A forward that cannot be repeated without a trace."""


@contextmanager
def no_queues(is_replaying: Callable[[], bool]) -> Iterator[None]:
    """Raise an UnrepeatableError where a replay takes from a queue or a pipe, which may wait forever, or puts to it.

    Other threads use them as always.
    """
    before: list[tuple[Any, str, Any]] = []
    try:
        for (module, name), methods in _SHARED.items():
            kind: Any = getattr(sys.modules.get(module), name, None)
            for method in methods if kind is not None else ():
                base = next(base for base in kind.__mro__ if method in vars(base))
                before.append((base, method, vars(base)[method]))
                setattr(base, method, _refused_if(is_replaying, method, before[-1][-1]))
        yield
    finally:
        for base, method, function in before:
            setattr(base, method, function)


def _refused_if(is_replaying: Callable[[], bool], name: str, function: Any) -> Any:
    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        if is_replaying():
            raise UnrepeatableError(f"it calls {name} of a queue or a pipe, which others use")
        return function(*args, **kwargs)

    return method


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

    def no_backward_hooks(self) -> AbstractContextManager[None]:
        """Remove the hooks of the modules' backwards during a block, as they may keep what they see."""
        tables = [attributes.get(name) for attributes, _ in self._attributes for name in _OF_BACKWARD]
        return without(table for table in tables if table)

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
