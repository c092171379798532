"""Progress of long calls in notebooks, without ipywidgets. Elsewhere, calls of the library print nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from castwise._shown import escape

_SECONDS_BETWEEN = 0.1


def _shell() -> Any:
    """Return the shell of IPython that runs this code; None if there is none."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def in_notebook() -> bool:
    """Return True in the kernel of a notebook, which shows results and progress as HTML."""
    return getattr(_shell(), "kernel", None) is not None


def cell_of(file: str) -> str:
    """Return the label of the cell whose code has this file name, such as "In[3]"; "" if it is no cell's."""
    name_of = getattr(getattr(_shell(), "compile", None), "format_code_name", None)  # IPython >= 8
    found = None if name_of is None else name_of(file)
    return "" if found is None else str(found[1])


@contextmanager
def notebook_progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """Show a bar below the cell during the block, in a notebook.

    Yields:
        A function of a description, the amount done and the total; None outside notebooks.
    """
    if not in_notebook():
        yield None
        return
    bar = _Bar()
    try:
        yield bar.show
    finally:
        bar.remove()


class _Bar:
    """A bar that exists once something was shown."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_at = 0.0

    def show(self, what: str, done: int, total: int) -> None:
        """Show what is done, at most ten times a second."""
        now = time.monotonic()
        if self._handle is not None and now - self._shown_at < _SECONDS_BETWEEN:
            return
        self._shown_at = now
        text = f"{what} {done}/{total}"
        page = f'<progress value="{done}" max="{total}"></progress> {escape(text)}'
        content = {"text/plain": text, "text/html": page}
        if self._handle is None:
            display = import_module("IPython.display").display
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": "", "text/html": ""}, raw=True)
