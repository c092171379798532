"""`castwise check`: is a script still the same computation, and as accurate?"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from castwise._cli.bisection import moved
from castwise._cli.program import LAUNCHERS, LAUNCHING_MODULES, Program
from castwise._user_error import UserError

if TYPE_CHECKING:
    from castwise.checking._golden import Golden
    from castwise.checking._result import CheckResult

ACTIONS = ("record", "accept")
GOLDEN = "golden.cwcheck"
CANNOT_RUN = 125


@dataclass(frozen=True)
class ScriptRun:
    """Runs a script as Python does; called once in each process that runs it."""

    name: str
    arguments: tuple[str, ...]
    is_module: bool
    folder: Path = Path()

    def __call__(self) -> None:
        """Run it, in its folder."""
        named = {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
        sys.path[:] = [moved(path, self.folder) if path in named else path for path in sys.path]
        os.chdir(self.folder)
        gc.freeze()  # the script's models are looked for among all objects but those that castwise and torch made
        self.program().execute()

    def program(self) -> Program:
        """Return the script, read.

        Raises:
            UserError: See `Program`.
        """
        return Program(self.name, list(self.arguments), is_module=self.is_module)


def check(
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT",
            help="A Python file, or a module with -m. Before it, `record` writes a golden file, and `accept` replaces "
            "one after a deliberate change.",
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments for the script, after `--`.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="Run SCRIPT as a module, as in python -m.")] = False,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="FILE", help=f"Golden file to compare with. [default: {GOLDEN}]"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", metavar="N", help="With `record` and --ops: optimizer steps. [default: 3, and 2 with --ops]"
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            metavar="N",
            help="With `record` and --ops: processes to start, instead of torchrun. [default: 1]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help=f"With `record`: file to write. [default: {GOLDEN}]"),
    ] = None,
    bisect: Annotated[
        str | None,
        typer.Option(
            "--bisect",
            metavar="GOOD..BAD",
            help="Find the first commit after GOOD, up to BAD, that differs from GOOD (or from --against); needs git. "
            "[default: check the files as they are]",
        ),
    ] = None,
    ops: Annotated[
        str | None,
        typer.Option(
            "--ops",
            metavar="FOLDER|COMMIT",
            help="Compare the ops that SCRIPT runs here with those that it runs in another folder or at a commit, and "
            "name the lines that differ. [default: check against the golden file]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Check that a training script is the same function as when it was recorded, and as accurate.

    Exits with 0 if it is both, with 1 if not, and with 125 if there is no verdict, as `git bisect run` expects. The
    script must build its model, optimizer and data from fixed seeds. It is ended after the recorded steps.
    """
    options = {"--against": against, "--steps": steps, "--ranks": ranks, "--out": out, "--bisect": bisect, "--ops": ops}
    try:
        code = _run(*_parsed(script, arguments or [], module), options, as_json)
    except UserError as error:
        typer.echo(f"castwise check: {error}", err=True)
        code = CANNOT_RUN
    except Exception:  # with Python's own exit code, 1, a full disk would look like a verdict
        traceback.print_exc()
        code = CANNOT_RUN
    raise typer.Exit(code)


def _run(action: str, run: ScriptRun, options: dict[str, Any], as_json: bool) -> int:
    """Do what is asked for, and return the exit code."""
    _check_options(action, options)
    _check_launcher(run)
    against, steps, ranks = options["--against"], options["--steps"], options["--ranks"] or 1
    if options["--bisect"] is not None:
        _bisect(run, options["--bisect"], against, as_json)
        return 0
    run.program()
    if options["--ops"] is not None:
        _compare_ops(run, options["--ops"], steps or 2, ranks, as_json)
        return 0
    if action == "record":
        _print_golden(_record(run, steps or 3, ranks, options["--out"] or Path(GOLDEN)), as_json)
        return 0
    found = _check(run, against or Path(GOLDEN))
    if action == "accept":
        _accept(run, found, against or Path(GOLDEN))
    typer.echo(json.dumps(found.as_dict()) if as_json else "\n".join(found.lines()))
    return 0 if action == "accept" else found.exit_code


def _parsed(script: str, arguments: list[str], is_module: bool) -> tuple[str, ScriptRun]:
    if script not in ACTIONS:
        return "check", ScriptRun(script, tuple(arguments), is_module)
    if not arguments:
        raise UserError(f"give a script to {script}, as in `castwise check {script} train.py`")
    return script, ScriptRun(arguments[0], tuple(arguments[1:]), is_module)


def _check_options(action: str, options: dict[str, Any]) -> None:
    given = [option for option, value in options.items() if value is not None]
    if action == "record" and "--against" in given:
        raise UserError("--against is for checking; `record` writes to --out")
    for option in ("--bisect", "--ops"):
        if option in given and action != "check":
            raise UserError(f"{option} is for checking; leave out `{action}`")
    compares_ops = "--ops" in given
    if compares_ops and ("--against" in given or "--bisect" in given):
        raise UserError(
            "--ops compares two versions of the script without a golden file; leave out --against and --bisect"
        )
    if "--out" in given and action != "record":
        raise UserError("--out is for `castwise check record`; the golden file to compare with is --against")
    for option, what in (("--steps", "steps"), ("--ranks", "ranks")):
        if option in given and action != "record" and not compares_ops:
            raise UserError(f"{option} is for `castwise check record`; the golden file has the {what}")
        if option in given and options[option] < 1:
            raise UserError(f"{option} must be at least 1, got {options[option]}")


def _check_launcher(run: ScriptRun) -> None:
    """Refuse launchers of ranks: each run needs ranks of its own."""
    is_launcher = run.name in LAUNCHING_MODULES if run.is_module else Path(run.name).name in LAUNCHERS
    if is_launcher or int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UserError("castwise starts the ranks itself, for each run: castwise check record --ranks N SCRIPT")


def _load(path: Path) -> Golden:
    from castwise.checking._golden import Golden

    try:
        return Golden.load(path)
    except FileNotFoundError:
        raise UserError(f"there is no {path}: write it with `castwise check record SCRIPT --out {path}`") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(str(error)) from None


def _check(run: ScriptRun, path: Path) -> CheckResult:
    from castwise._terminal import progress_bar
    from castwise.checking._checking import check
    from castwise.checking._measuring import ProgramError

    golden = _load(path)
    try:
        with progress_bar() as progress:
            return check(run, golden, apart=True, progress=progress)
    except ProgramError as error:
        raise _failed(run, error) from None


def _record(run: ScriptRun, steps: int, ranks: int, out: Path) -> Golden:
    from castwise._terminal import progress_bar
    from castwise.checking._checking import NotReproducibleError, record
    from castwise.checking._golden import refuse_foreign
    from castwise.checking._measuring import ProgramError

    if not out.parent.is_dir():
        raise UserError(f"cannot write {out}: there is no folder {out.parent}; create it first")
    try:
        refuse_foreign(out)  # before the runs, too
        with progress_bar() as progress:
            golden = record(run, steps, apart=True, ranks=ranks, progress=progress)
        golden.save(out)
    except ProgramError as error:
        raise _failed(run, error) from None
    except (NotReproducibleError, ValueError) as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None
    typer.echo(f"wrote {out}", err=True)
    return golden


def _failed(run: ScriptRun, error: Exception) -> UserError:
    advice = ""
    if "environment variable RANK expected" in str(error):
        advice = "\nfor a script of ranks, give their number: castwise check record --ranks N SCRIPT"
    return UserError(f"{run.name} failed:\n{error}{advice}")


def _accept(run: ScriptRun, found: CheckResult, path: Path) -> None:
    """Record again, if anything has changed."""
    if found.kind != "identical":
        before = _load(path)
        _record(run, before.steps, int(before.about.get("ranks", 1)), path)


def _bisect(run: ScriptRun, commits: str, against: Path | None, as_json: bool) -> None:
    """Print the first commit that differs, and how."""
    from castwise._cli.bisection import Bisection, Command, subject

    if Path(run.name).is_absolute():
        raise UserError(f"with --bisect, give the script's path relative to this folder, not {run.name}")
    options = ("--module",) if run.is_module else ()
    with tempfile.TemporaryDirectory(prefix="castwise-golden-") as folder:
        golden = Path(folder, GOLDEN) if against is None else against.resolve()
        command = Command((*options, run.name), run.arguments, golden)
        bisection = Bisection.between(commits, command.check, lambda line: typer.echo(line, err=True))
        first, tried = bisection.first(command.record if against is None else lambda folder: None)
    if as_json:
        typer.echo(json.dumps({"commit": first, **tried.result}))
    else:
        typer.echo(f"the first commit that differs: {subject(first)}\n{tried.result['verdict']}")


def _compare_ops(run: ScriptRun, other: str, steps: int, ranks: int, as_json: bool) -> None:
    """Print which ops differ from those of the script in another folder or at another commit."""
    from castwise._cli.bisection import commit_named, work_tree
    from castwise._terminal import progress_bar
    from castwise.checking._checking import compare_ops
    from castwise.checking._measuring import ProgramError

    if Path(run.name).is_absolute():
        raise UserError(f"with --ops, give the script's path relative to this folder, not {run.name}")
    before = nullcontext(Path(other)) if Path(other).is_dir() else work_tree(commit_named(other))
    with before as folder:
        if not (run.is_module or Path(folder, run.name).exists()):
            raise UserError(f"there is no {run.name} in {other}")
        try:
            with progress_bar() as progress:
                old = replace(run, folder=folder)
                found = compare_ops(old, run, steps, apart=True, ranks=ranks, progress=progress)
        except ProgramError as error:
            raise _failed(run, error) from None
        except ValueError as error:
            raise UserError(str(error)) from None
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
    else:
        typer.echo("\n".join(found.lines()))


def _print_golden(golden: Golden, as_json: bool) -> None:
    facts = {
        "steps": golden.steps,
        "dtype": golden.dtype,
        "probes": len(golden.probes),
        "left_out": len(golden.left_out),
    }
    if as_json:
        typer.echo(json.dumps({**facts, **golden.about}))
    else:
        typer.echo(
            f"recorded {golden.steps} steps in {golden.dtype}: {len(golden.probes)} probes, of which "
            f"{facts['left_out']} are rounding noise and will not be compared"
        )
