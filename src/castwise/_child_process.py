"""Commands for child Python processes that import no modules from the user's current directory."""

from __future__ import annotations

import sys
from pathlib import Path

# `python -c` and `python -m` search the current directory first. From Python 3.11 on, -P prevents that.
_SAFE = ["-P"] if sys.version_info >= (3, 11) else []
_ELSEWHERE = "import sys; sys.path = [place for place in sys.path if place]"
_RUN = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def python(code: str, *arguments: str) -> list[str]:
    """Return the command that runs code in a new process, which imports castwise from where this process did."""
    ours = str(Path(__file__).parents[1])
    return [sys.executable, *_SAFE, "-c", f"{_ELSEWHERE}; sys.path.append({ours!r})\n{code}", *arguments]


def module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module, as `python -m` does."""
    return python(_RUN, name, *arguments)
