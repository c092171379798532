"""Processes of our own, which do not look for modules in the folder that the user is in."""

from __future__ import annotations

import sys
from pathlib import Path

# `python -c` and `python -m` look there first; -P turns that off from Python 3.11 on, before anything is imported.
_SAFE = ["-P"] if sys.version_info >= (3, 11) else []
_ELSEWHERE = "import sys; sys.path = [place for place in sys.path if place]"
_RUN = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def python(code: str, *arguments: str) -> list[str]:
    """Return the command that runs code, which finds castwise where this process has."""
    ours = str(Path(__file__).parents[1])
    return [sys.executable, *_SAFE, "-c", f"{_ELSEWHERE}; sys.path.append({ours!r})\n{code}", *arguments]


def module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module, as `python -m` does."""
    return python(_RUN, name, *arguments)
