"""`castwise watch`: show runs in the terminal while they go on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    seconds: Annotated[float, typer.Option("--every", metavar="N", help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print what there is now, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each look as a line of JSON.")] = False,
) -> None:
    """Show loss, gradient norm, learning rate and findings of a run in the terminal while it goes on, for each rank.

    Ends with the run, or with Ctrl-C, which leaves the run alone.
    """
    try:
        if not seconds > 0.0:
            raise UserError(f"--every must be above 0 seconds, got {seconds:g}")
        if once:
            _show(_read(folder), as_json)
        else:
            _follow(folder, seconds, as_json)
    except UserError as error:
        typer.echo(f"castwise watch: {error}", err=True)
        raise typer.Exit(2) from None


def _show(runs: list[Run], as_json: bool) -> None:
    from castwise._cli.watch_view import facts, view

    if as_json:
        typer.echo(json.dumps(facts(runs)))
    else:
        new_console(WIDTH).print(view(runs))


def _follow(folder: Path, seconds: float, as_json: bool = False, sleep: Callable[[float], object] = time.sleep) -> None:
    from rich.live import Live

    from castwise._cli.watch_view import view

    with nullcontext() if as_json else Live(console=new_console(WIDTH), auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            runs = _read(folder)
            if live is None:
                _show(runs, as_json)
            else:
                live.update(view(runs), refresh=True)
            if all(run.ended for run in runs):
                return
            sleep(max(seconds, (time.monotonic() - began) / _SHARE_OF_TIME))


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
