"""`castwise watch`: show runs in the terminal while they go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from castwise._cli.completion import RUNS
from castwise._terminal import new_console
from castwise._user_error import UserError

if TYPE_CHECKING:
    from castwise.monitor._recorded_run import Run

WIDTH = 100
_SHARE_OF_TIME = 0.1  # at most, for reading records: those of a long run take a while


def watch(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="A folder of runs, of which the latest is shown, or the folder of a run."
        ),
    ] = Path(RUNS),
    seconds: Annotated[float, typer.Option("--every", metavar="SECONDS", help="Time between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print what there is now, and end.")] = False,
) -> None:
    """Show loss, gradient norm, learning rate and findings of a run in the terminal while it goes on, for each rank.

    Ends with the run, or with Ctrl-C, which leaves the run alone.
    """
    try:
        if not seconds > 0.0:
            raise UserError(f"--every must be above 0 seconds, got {seconds:g}")
        if once:
            new_console(WIDTH).print(_view(_read(folder)))
        else:
            _follow(folder, seconds)
    except UserError as error:
        typer.echo(f"castwise watch: {error}", err=True)
        raise typer.Exit(2) from None


def _follow(folder: Path, seconds: float, sleep: Callable[[float], object] = time.sleep) -> None:
    from rich.live import Live

    with Live(console=new_console(WIDTH), auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            runs = _read(folder)
            live.update(_view(runs), refresh=True)
            if all(run.ended for run in runs):
                return
            sleep(max(seconds, (time.monotonic() - began) / _SHARE_OF_TIME))


def _view(runs: list[Run]) -> Any:
    from castwise._cli.watch_view import view

    return view(runs)


def _read(folder: Path) -> list[Run]:
    """Read the records of the latest run, one for each model and rank."""
    from castwise._cli.report_command import _run_with_records
    from castwise.monitor._recorded_run import Run

    _, files = _run_with_records(folder)
    try:
        return [Run.read(file) for file in files]
    except OSError as error:
        raise UserError(f"cannot read {error.filename or folder}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(str(error)) from None
