"""`castwise run`: a training script, unchanged, with castwise instead of torch's mixed precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from castwise._suggestions import nearest
from castwise._user_error import UserError
from castwise.cli.names import SCHEDULES, complete_policy, completing

OUT = Path("castwise-run")


class OnSkip(str, Enum):
    """What `--on-skip` takes."""

    FIRST = "first"
    DIAGNOSE = "diagnose"
    NOTHING = "nothing"


class FailOn(str, Enum):
    """What `--fail-on` takes."""

    MISTAKE = "mistake"
    WARNING = "warning"
    CRITICAL = "critical"


DIAGNOSES = {OnSkip.FIRST: 3, OnSkip.DIAGNOSE: math.inf, OnSkip.NOTHING: 0}

chosen: list[Callable[[], None]] = []
"""What `castwise.__main__` is to do when the command line has been read: outside of typer, which would catch what the
script raises, and end a process in its own way."""


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file; with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The script's own.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FOLDER", help="For records and report; those of an earlier run go."),
    ] = OUT,
    every: Annotated[int, typer.Option(metavar="N", min=1, help="Steps between samples of the numbers.")] = 100,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="In force in all regions, instead of their dtype.",
            autocompletion=complete_policy,
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEDULE",
            help='Of all scalers, such as Headroom or "Dynamic(hysteresis=2)".',
            autocompletion=completing(*SCHEDULES),
        ),
    ] = None,
    weight_cache: Annotated[
        bool, typer.Option("--weight-cache", help="Keep casts of weights between regions.")
    ] = False,
    on_skip: Annotated[
        OnSkip,
        typer.Option(
            metavar="[first|diagnose|nothing]",
            help="Diagnose the first three skipped steps of each cause, all of them, or none.",
        ),
    ] = OnSkip.FIRST,
    fail_on: Annotated[
        list[FailOn] | None,
        typer.Option(
            metavar="[mistake|warning|critical]",
            help="Exit with 1 if the script has such a mistake or finding; can be given several times.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON instead of text.")] = False,
) -> None:
    """Run a training script with castwise instead of torch.amp, monitored, and write a report at its end.

    Options for castwise come before SCRIPT, those of the script after it. The script's exit code, traceback and output
    are its own; castwise writes to standard error. Exits with 2 if the script cannot be run, and with 1 for --fail-on.
    """
    from castwise.cli.policies import read_policy, read_schedule
    from castwise.cli.script import Ending, Script

    try:
        _check_script(script, context)
        wanted = None if policy is None else read_policy(policy)
        moved_by = None if schedule is None else read_schedule(schedule)
        _check_folder(out)
        program = Script(script, arguments or [], is_module=module)
    except UserError as error:
        typer.echo(f"castwise run: {error}", err=True)
        raise typer.Exit(2) from None
    ending = Ending(tuple(level.value for level in fail_on or ()), as_json)
    chosen.append(lambda: program.run(out, every, wanted, moved_by, weight_cache, DIAGNOSES[on_skip], ending))


def _check_folder(out: Path) -> None:
    try:
        if out.exists() and not out.is_dir():
            raise UserError(f"--out must be a folder, and {out} is a file")
    except OSError as error:  # a name that is too long
        raise UserError(f"--out {out}: {error.strerror}") from None


def _check_script(script: str, context: typer.Context) -> None:
    if script.startswith("-"):
        given = script.partition("=")[0]
        own = [option.lstrip("-") for param in context.command.params for option in param.opts]
        raise UserError(
            f"it has no option {given}{nearest(given.lstrip('-'), own)}; options of the script go after it, as in "
            "`castwise run train.py --lr 3`"
        )
