"""Where commands print their tables. It needs rich, so the library never imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from rich.console import Console

from castwise._width import columns


def new_console(width: int, file: IO[str] | None = None) -> Console:
    """Return a console for a file, or for stdout, that prints paths and names as they are.

    Args:
        width: Columns in a file or a pipe, unless the environment has COLUMNS; a terminal knows its own.
        file: Where to print; None is stdout.
    """
    wide = columns()
    if wide is None and not (file is None and sys.stdout.isatty()):
        wide = width
    return Console(file=file, width=wide, highlight=False, markup=False, emoji=False)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on stderr until the block ends; where stderr is no terminal, show nothing.

    Yields:
        Takes what is being done, how much of it is done, and how much there is. The bar is drawn in this call alone: a
        thread that draws would disturb what is measured.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    bar = Progress(
        *(TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn()),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not (sys.stderr.isatty() and console.is_interactive),
    )
    with bar:
        task = bar.add_task("", visible=False)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, visible=True)
            bar.refresh()

        yield show
