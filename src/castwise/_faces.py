"""Faces: packages whose names are imported on first use, which keeps `import castwise` light."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def face(
    package: str, names: Mapping[str, str], submodules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    Errors from an import, such as one that names a missing extra, propagate unchanged.

    Args:
        package: Full name of the package.
        names: The module of the package, such as `_run`, that defines each name.
        submodules: Submodules of the package that are public.
    """
    public = {*names, *submodules}

    def get(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name not in names:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(f"{package}.{names[name]}"), name)
        setattr(sys.modules[package], name, value)  # so that the next use is an ordinary attribute
        return value

    return get, lambda: sorted(public)
