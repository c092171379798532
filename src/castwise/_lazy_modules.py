"""Submodules that are imported on first use, which keeps `import castwise` light."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def submodules_of(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports its submodules on first use.

    Errors from the import of a submodule, such as one that names a missing extra, propagate unchanged.
    """

    def get(name: str) -> Any:
        if not name.startswith("_"):  # doctest, inspect and other tools probe every module for private names
            module = f"{package}.{name}"
            try:
                return import_module(module)
            except ModuleNotFoundError as error:
                if error.name != module:
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
