"""`castwise run`: run an unchanged training script with castwise instead of torch.amp."""

from __future__ import annotations

import math
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from castwise._cli.completion import LEVELS, POLICIES, RUNS, SCHEDULES, complete_policy, completing
from castwise._cli.option_checks import check_name, check_policy, check_schedule_name
from castwise._cli.program import Program, check_is_none_of_pythons
from castwise._invariants.invariant import INVARIANTS, Exemptions
from castwise._suggestions import nearest
from castwise._user_error import UserError

OUT = Path(RUNS)


# Largest number of diagnosed steps per model and cause, by `--on-nonfinite`.
DIAGNOSES = {"first": 3, "diagnose": math.inf, "nothing": 0}

chosen: list[Callable[[], None]] = []
"""Calls for `castwise.__main__` to make after the command line is parsed, outside typer, which would catch the script's
exceptions and end the process in its own way."""


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or a module with -m.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments for the script.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run SCRIPT as a module, as in python -m.")] = False,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FOLDER", help="Folder of runs; each gets a new subfolder for records and report."
        ),
    ] = OUT,
    every: Annotated[int, typer.Option(metavar="N", help="Steps between samples of the numbers.")] = 100,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"Policy for all autocast regions: a file, or {', '.join(POLICIES)}. [default: the script's dtypes]",
            autocompletion=complete_policy,
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEDULE",
            help='Schedule for all scalers, such as Headroom or "Dynamic(hysteresis=2)". [default: the script\'s]',
            autocompletion=completing(*SCHEDULES),
        ),
    ] = None,
    weight_cache: Annotated[
        bool, typer.Option("--weight-cache", help="Keep casts of weights until a weight changes.")
    ] = False,
    on_nonfinite: Annotated[
        str,
        typer.Option(
            metavar=f"[{'|'.join(DIAGNOSES)}]",
            help="Diagnose the first three steps with an inf or NaN of each cause (first), all (diagnose), or none "
            "(nothing).",
            autocompletion=completing(*DIAGNOSES),
        ),
    ] = "first",
    guard: Annotated[
        bool, typer.Option("--guard", help="Skip steps with an inf or NaN in a gradient, also without a scaler.")
    ] = False,
    exempt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="INVARIANT[=PATTERN]",
            help='Do not check an invariant, or not of "experts.*" and such; repeatable. [default: check all]',
            autocompletion=completing(*INVARIANTS),
        ),
    ] = None,
    spikes: Annotated[
        bool,
        typer.Option("--spikes", help="Keep weights and a few batches, which tell what made the loss rise."),
    ] = False,
    snapshots: Annotated[
        bool,
        typer.Option(
            "--snapshots",
            help="Keep weights of earlier steps, which tell a fault of the batch from one of the weights. On a GPU, "
            "batches of taken steps are replayed with them.",
        ),
    ] = False,
    capsules: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Largest number of capsules of faults in the run's folder: weights and batch, for castwise diagnose.",
        ),
    ] = 3,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check",
            metavar="FILE",
            help="Before the run, compare its first steps with a golden file, or record it if there is none, as "
            "`castwise check` does. The script runs whatever it says. [default: neither]",
        ),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Exit with 1 on a mistake (mistake), or on a finding of at least this severity (warning, critical); "
            "repeatable. [default: never]",
            autocompletion=completing(*LEVELS),
        ),
    ] = None,
    shared_script: Annotated[
        bool,
        typer.Option(
            "--shared-script",
            help="Load plotly.js (1 MB, written once) from a file in the folder of runs, so that reports are small.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the final summary as one line of JSON.")] = False,
) -> None:
    """Run a training script with castwise instead of torch.amp, and write a report when it ends.

    Put options of castwise before SCRIPT and options of the script after it. Output, traceback and exit code are the
    script's; castwise prints to standard error.
    """
    try:
        _check_script(script, context)
        if every < 1:
            raise UserError(f"--every must be at least 1, got {every}")
        if capsules < 0:
            raise UserError(f"--capsules must be at least 0, got {capsules}")
        check_name("--on-nonfinite", on_nonfinite, DIAGNOSES)
        if snapshots and not DIAGNOSES[on_nonfinite]:
            raise UserError("--snapshots is for diagnoses, which --on-nonfinite nothing turns off")
        exemptions = _exemptions(exempt or ())
        for level in fail_on or ():
            check_name("--fail-on", level, LEVELS)
        source = context.get_parameter_source("out")
        if source is not None and source.name == "COMMANDLINE":  # the default's folder may fail without ending the run
            _check_folder(out)
        program = Program(script, arguments or [], is_module=module)  # without torch, which takes seconds to load
        if policy is not None:
            check_policy(policy)
        if schedule is not None and schedule.isidentifier():
            check_schedule_name(schedule, schedule)
        said = None
        if check is not None:
            if policy is not None or schedule is not None or weight_cache:
                raise UserError("--check runs the script as it is; leave out --policy, --schedule and --weight-cache")
            if int(os.environ.get("WORLD_SIZE") or 1) > 1:
                raise UserError("--check starts the ranks itself: castwise check record --ranks N SCRIPT")
            said = _check_first_steps(program, check)
        if policy is None and schedule is None and not as_json and program.cannot_import_torch():
            from castwise._cli.script_without_torch import run_without_torch

            chosen.append(lambda: run_without_torch(program))
            return
        from castwise._cli.policy_options import read_policy, read_schedule

        wanted = None if policy is None else read_policy(policy)
        moved_by = None if schedule is None else read_schedule(schedule)
    except UserError as error:
        typer.echo(f"castwise run: {error}", err=True)
        raise typer.Exit(2) from None
    from castwise._cli.script import Ending, Script, Watching

    ending = Ending(tuple(level for level in LEVELS if level in (fail_on or ())), as_json, said)
    diagnoses = DIAGNOSES[on_nonfinite]
    watching = Watching(out, every, diagnoses, guard, exemptions, spikes, snapshots, capsules, shared_script)
    chosen.append(lambda: Script(program).run(watching, wanted, moved_by, weight_cache, ending))


def _check_first_steps(program: Program, golden: Path) -> str | None:
    """Compare a script with a golden file, or record it; in another process, as this one is to run it unchanged.

    Standard input is left to the run. Returns the verdict, or that there is none; None if all is well.
    """
    script = [*(["--module"] if program.is_module else []), program.name]
    words = [*script, "--against", str(golden)] if os.path.exists(golden) else ["record", *script, "--out", str(golden)]
    command = [sys.executable, "-m", "castwise", "check", *words, "--", *program.arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    sys.stderr.write(done.stdout)
    return (done.stdout.splitlines() or ["no verdict"])[0] if done.returncode else None


def _exemptions(options: Iterable[str]) -> dict[str, list[str]]:
    try:
        return Exemptions.parsed(options)
    except ValueError as error:
        raise UserError(f"--exempt {error}") from None


def _check_folder(out: Path) -> None:
    try:
        mode = out.stat().st_mode  # `exists` hides all errors since Python 3.14
    except FileNotFoundError:
        return
    except OSError as error:  # such as a name that is too long
        raise UserError(f"--out {out}: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise UserError(f"--out must be a folder, but {out} is a file")


def _check_script(script: str, context: typer.Context) -> None:
    if script.startswith("-"):
        given = script.partition("=")[0]
        check_is_none_of_pythons(given)
        own = [option.lstrip("-") for param in context.command.params for option in param.opts]
        raise UserError(
            f"there is no option {given}{nearest(given.lstrip('-'), own)}; put options of the script after it, as in "
            "`castwise run train.py --lr 3`"
        )
