"""All objects of a class that the process has."""

from __future__ import annotations

import gc
from typing import Any, TypeVar

_T = TypeVar("_T")


def instances_of(cls: type[_T]) -> list[_T]:
    """Return the objects of a class and its subclasses that the garbage collector knows, oldest first.

    Some may be unfinished: their `__init__` has not run yet. Objects that `gc.freeze` set aside are not among them.
    """
    objects: list[Any] = gc.get_objects()
    # `isinstance` would read `__class__`, which proxies take from their target and some deprecated objects warn of.
    return [each for each in objects if issubclass(type(each), cls)]
