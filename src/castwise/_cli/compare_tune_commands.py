"""`castwise compare` and `castwise tune`: the effect of precision on a model, and the cheapest policy for its loss."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from castwise._cli.completion import (
    COSTS,
    FORMATS,
    POLICIES,
    RECIPES,
    REFERENCES,
    VARIATIONS,
    complete_policy,
    completing,
)
from castwise._cli.model_errors import MODEL_ERROR, print_from_model
from castwise._cli.option_checks import check_name, check_policy, check_target
from castwise._cli.report_command import SharedScript
from castwise._files import refuse_foreign
from castwise._suggestions import listed, nearest
from castwise._terminal import new_console, progress_bar
from castwise._user_error import UserError

if TYPE_CHECKING:
    from castwise.comparison._drift import Drift
    from castwise.policy._policy import Policy
    from castwise.tuning._tuned import Tuned

WIDTH = 160
UNREACHED, USER_ERROR, INTERRUPTED = 1, 2, 130
# Options by the argument that error messages of the library begin with.
_OPTIONS = {"formats": "--format", "tolerance": "--tolerance", "vary": "--vary"}
_TASK = (
    "Function in a module or .py file that takes no arguments and returns a model, a list of (inputs, targets), and a "
    "loss function of outputs and targets. The default is a small GPT."
)
_DEFAULT = "castwise._demo.gpt:task"

Model = Annotated[str, typer.Option("--model", metavar="MODULE|FILE:FACTORY", help=_TASK)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Report = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Also write an HTML page with plots. [default: none]")
]


def compare(
    model: Model = _DEFAULT,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"A policy file, or one of {', '.join(POLICIES)}; repeatable. [default: bf16]",
            autocompletion=complete_policy,
        ),
    ] = None,
    reference: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Reference to compare with: float32, float64, or a policy.",
            autocompletion=completing(*REFERENCES, *POLICIES),
        ),
    ] = "float32",
    gradients: Annotated[
        bool,
        typer.Option("--gradients/--no-gradients", help="Compare weight gradients too, or only the forward."),
    ] = True,
    vary: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Also measure how much another {' or '.join(VARIATIONS)} changes the reference. [default: none]",
            autocompletion=completing(*VARIATIONS),
        ),
    ] = None,
    page: Report = None,
    shared_script: SharedScript = False,
    as_json: AsJson = False,
) -> None:
    """Show how precision changes a model's loss and gradients, module by module."""
    with _one_line_errors("compare"):
        _check_page(page)
        check_name("--vary", vary, VARIATIONS)
        _check_reference(reference)
        check_target(model)
        for text in policy or ():
            check_policy(text)
        from castwise._cli.policy_options import naming, read_policy  # loads torch, which takes seconds
        from castwise._cli.traced_model import find_task
        from castwise.comparison._precision_drift import Comparison

        net, batches, loss = find_task(model)
        names = _names(policy or ["bf16"])
        policies = {name: read_policy(text) for name, text in names.items()}
        against = _read_reference(reference)
        for name, policy_of_name in policies.items():
            try:
                policy_of_name.bind(net).unbind()
            except ValueError as error:
                raise UserError(naming(name, error)) from None
        comparison = _checked(lambda: Comparison(net, loss, None, against, gradients, vary), net, batches)
        with progress_bar() as progress:
            drift = comparison.drift(batches, policies, progress)
        _write(drift, page, shared_script)
    if as_json:
        typer.echo(json.dumps(drift.as_dict(), indent=2, allow_nan=False))
    else:
        _print(drift)


def tune(
    model: Model = _DEFAULT,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"A format to try ({', '.join(FORMATS)}) or a recipe ({', '.join(RECIPES)}); repeatable. "
            f"[default: {', '.join(FORMATS)}]",
            autocompletion=completing(*FORMATS, *RECIPES),
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(metavar="N", help="Largest acceptable relative error of the loss.")
    ] = 0.01,
    cost: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Cost to minimize: {', '.join(COSTS)} (seconds on this machine).",
            autocompletion=completing(*COSTS),
        ),
    ] = "flops",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the policy to a .toml or .json file. [default: none]"
        ),
    ] = None,
    page: Report = None,
    shared_script: SharedScript = False,
    as_json: AsJson = False,
) -> None:
    """Search for the cheapest policy that keeps a model's loss on held-out batches.

    The search compares the loss of single steps with float32; it does not prove that a long run ends in the same place.
    """
    with _one_line_errors("tune"):
        if output is not None and output.suffix not in {".toml", ".json"}:
            raise UserError(f"--output must end in .toml or .json, got {str(output)!r}")
        _check_page(page)
        check_name("--cost", cost, COSTS)
        for name in formats or ():
            check_name("--format", name, (*FORMATS, *RECIPES))
        if not 0 < tolerance < math.inf:
            raise UserError(f"--tolerance must be a finite number > 0, got {tolerance}")
        check_target(model)
        from castwise._cli.traced_model import find_task  # loads torch, which takes seconds
        from castwise.policy._policy import is_policy
        from castwise.tuning._precision_search import Search

        _check_output(output, "a policy", is_policy)
        net, batches, loss = find_task(model)
        search = _checked(lambda: Search(net, loss, None, formats or list(FORMATS), tolerance, cost), net, batches, 2)
        with progress_bar() as progress:
            best = search.tuned(batches, progress)
        if output is not None:
            _save(best.policy, output)
        _write(best, page, shared_script)
    typer.echo(json.dumps(best.as_dict(), indent=2, allow_nan=False) if as_json else str(best))
    if not best.is_within_tolerance:
        raise typer.Exit(UNREACHED)


@contextmanager
def _one_line_errors(command: str) -> Iterator[None]:
    """Report user errors in one line, and errors of the model with a traceback."""
    try:
        yield
    except UserError as error:
        typer.echo(f"castwise {command}: {error}", err=True)
        raise typer.Exit(USER_ERROR) from None
    except Exception as error:
        from castwise.comparison._precision_drift import NonfiniteReferenceError

        if isinstance(error, NonfiniteReferenceError):
            typer.echo(f"castwise {command}: {error}", err=True)
            raise typer.Exit(UNREACHED) from None
        if isinstance(error, (TypeError, ValueError)) and _is_ours(error):
            typer.echo(f"castwise {command}: {_as_typed(error)}", err=True)
            raise typer.Exit(USER_ERROR) from None
        print_from_model(error)
        raise typer.Exit(MODEL_ERROR) from None
    except KeyboardInterrupt:
        typer.echo(f"castwise {command}: stopped", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _checked(make: Callable[[], Any], net: Any, batches: Any, least: int = 1) -> Any:
    """Call `make` and check the batches, turning errors of either into user errors."""
    from castwise.comparison._objective import Objective

    try:
        made = make()
        checked = Objective(net, lambda outputs, targets: outputs, None).check(batches)
    except (TypeError, ValueError) as error:
        raise UserError(_as_typed(error)) from None
    if len(checked) < least:
        raise UserError("the factory must return at least two batches because every second one is held out, got one")
    return made


def _as_typed(error: Exception) -> str:
    """Return a message that names the option instead of the Python argument."""
    argument, _, rest = str(error).partition(" ")
    return f"{_OPTIONS.get(argument, argument)} {rest}"


def _is_ours(error: Exception) -> bool:
    """Return True if castwise, not the model, raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = ("castwise.comparison.", "castwise.tuning.", "castwise.tracing.")
    return str(frames[-1].f_globals.get("__name__")).startswith(ours)


def _names(policies: list[str]) -> dict[str, str]:
    """Return policies as given by name; a file is named by its stem if that is unique."""
    policies = list(dict.fromkeys(policies))
    stems = [text if text in POLICIES else Path(text).stem for text in policies]
    pairs = zip(stems, policies, strict=True)
    return {stem if stems.count(stem) == 1 else text: text for stem, text in pairs}


def _check_reference(text: str) -> None:
    if text not in (*REFERENCES, *POLICIES) and Path(text).suffix not in {".toml", ".json"}:
        known = (*REFERENCES, *POLICIES)
        raise UserError(
            f"--reference must be one of {listed(known)}, or a .toml or .json file, got {text!r}{nearest(text, known)}"
        )
    if text not in REFERENCES:
        check_policy(text)


def _read_reference(text: str) -> Any:
    from castwise._cli.policy_options import read_policy

    return text if text in REFERENCES else read_policy(text)


def _check_page(page: Path | None) -> None:
    from castwise.report._page import is_page

    _check_output(page, "a page", is_page)


def _check_output(path: Path | None, what: str, is_ours: Callable[[bytes], bool]) -> None:
    """Raise UserError before a long run if its results could not be written."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}; create it first")
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder; give the path of a file")
    try:
        if path.is_file():
            refuse_foreign(path, what, is_ours)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _save(policy: Policy, output: Path) -> None:
    try:
        policy.to_file(output)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None
    typer.echo(f"wrote {output}", err=True)


def _write(result: Drift | Tuned, page: Path | None, shared_script: bool) -> None:
    if page is None:
        return
    try:
        result.report(page, shared_script=shared_script)
    except ImportError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"cannot write {error.filename or page}: {error.strerror}") from None
    typer.echo(f"wrote {page}", err=True)


def _print(drift: Drift) -> None:
    from castwise.comparison._drift import MODULE_NUMBERS, SHOWN_MODULES

    console = new_console(WIDTH)
    console.print(drift.headline())
    if result := drift.result():
        console.print(result)
    summary = drift.summary_rows()
    _print_table(console, summary, set(range(1, len(summary[0]))))
    for policy_drift in drift:
        if policy_drift.problem:  # the notes report it
            continue
        rows = policy_drift.rows(drift.noise)
        console.print(f"{policy_drift.name}: modules by effect on the loss")
        _print_table(console, rows[: SHOWN_MODULES + 1], MODULE_NUMBERS)
        if len(rows) - 1 > SHOWN_MODULES:
            console.print(f"and {len(rows) - 1 - SHOWN_MODULES:,} more modules (--json lists all)")
    if drift.not_called:
        console.print(f"never called: {', '.join(drift.not_called)}")
    for note in drift.notes:
        console.print(f"note: {note}")


def _print_table(console: Any, rows: list[tuple[str, ...]], right: set[int]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if number in right else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)
