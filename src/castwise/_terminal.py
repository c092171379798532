"""Terminal output of the commands. This module needs rich, so the library never imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from rich.console import Console

from castwise._width import columns


def new_console(width: int, file: IO[str] | None = None) -> Console:
    """Return a console that prints text unchanged, without markup or highlighting.

    Args:
        width: Columns in a file or a pipe, unless COLUMNS is set in the environment; a terminal has its own width.
        file: The file to print to; None means stdout.
    """
    wide = columns()
    if wide is None and not (file is None and sys.stdout.isatty()):
        wide = width
    return Console(file=file, width=wide, highlight=False, markup=False, emoji=False)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on stderr during the block, if stderr is a terminal.

    Yields:
        A function of a description, the amount done and the total. The bar is redrawn only in this call, because a
        drawing thread would disturb measurements.
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
