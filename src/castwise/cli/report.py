"""`castwise report`: what a monitor recorded, as a page for a browser or as text for the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from castwise._number_text import headroom, percent, power_of_two, several
from castwise._user_error import UserError
from castwise.monitor.run import Run
from castwise.monitor.sinks import FILE_NAME
from castwise.report.advice import Severity
from castwise.report.report import labels, write_report
from castwise.report.run_facts import RunFacts, shown
from castwise.report.verdicts import judge
from castwise.report.worst_modules import worst_modules

PAGE = "report.html"
WORST_SHOWN = 6
STYLES: dict[Severity, str] = {"critical": "bold red", "warning": "yellow", "note": "cyan", "good": "green"}


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help=f"Folders with a {FILE_NAME}, or with such folders; or the files."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help=f"The page; {PAGE} in the first RUN otherwise."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the essentials instead of writing a page.")] = False,
) -> None:
    """Write one HTML page, which needs no network, about what happened to the numbers of runs.

    Exits with 0, or with 2 if something was asked that cannot be done.
    """
    try:
        files = [file for run in runs for file in _records_in(run)]
        read = [_read(file) for file in files]
        if text:
            _print(read)
        else:
            page = output or (runs[0] if runs[0].is_dir() else runs[0].parent) / PAGE
            typer.echo(f"wrote {_write(read, page)}")
    except UserError as error:
        typer.echo(f"castwise report: {error}", err=True)
        raise typer.Exit(2) from None


def _records_in(path: Path) -> list[Path]:
    """The record of a run, or those of the runs in a folder, such as that of a demo."""
    try:
        if not path.exists():
            raise UserError(f"there is no {path}")
        if not path.is_dir():
            return [path]
        own = path / FILE_NAME
        found = [own] if own.is_file() else sorted(path.glob(f"*/{FILE_NAME}"))
    except OSError as error:  # a name that is too long
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if not found:
        raise UserError(f"there is no {FILE_NAME} in {path}: castwise.Monitor(..., sinks=[{str(path)!r}]) writes one")
    return found


def _read(file: Path) -> Run:
    try:
        return Run.read(file)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, KeyError) as error:
        raise UserError(str(error)) from None


def _write(runs: list[Run], page: Path) -> Path:
    try:
        return write_report(runs, page)
    except ImportError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"cannot write {page}: {error.strerror}") from None


def _print(runs: list[Run]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for label, run in zip(labels([run.path for run in runs]), runs, strict=True):
        facts = RunFacts(run)
        console.rule(Text(label))
        console.print(_summary(facts), markup=False)
        if facts.skips:
            console.print(_skips(facts))
        if facts.gradients or facts.activations:
            console.print(_worst(facts))
        for mistake in run.mistakes:
            where = f"{mistake['file']}:{mistake['line']}: " if mistake["file"] else ""
            console.print(Text("mistake: ", style="bold red").append(f"{where}{mistake['text']}", style="default"))
            corrected = mistake["corrected"].replace("\n", "\n           ")
            console.print(Text(f"  correct: {corrected}", style="dim"))
        for advice in judge(facts):
            line = Text(f"{advice.severity}: ", style=STYLES[advice.severity])
            console.print(line.append(advice.text, style="default"))
            numbers = "; ".join(f"{name} {value}" for name, value in advice.shown_evidence())
            console.print(Text(f"  {numbers}", style="dim"))


def _summary(facts: RunFacts) -> str:
    parts = [several(len(facts.run.steps), "step"), f"{facts.skipped:,} skipped"]
    if facts.scales:
        scales = [scale for _, scale in facts.scales]
        span = f"from {power_of_two(min(scales))} to {power_of_two(max(scales))}"
        parts.append(f"scale {power_of_two(scales[-1])}, {span}")
    return "; ".join([*parts, several(len(facts.run.samples), "sample")])


def _skips(facts: RunFacts) -> Table:
    table = _table("Skipped for", "steps", "first", "last", "not finite", right={1, 2, 3})
    for skips in facts.skips:
        names = ", ".join(name for name, _ in skips.parameters[:3])
        ends = (f"{step:,}" for step in (skips.steps[0], skips.steps[-1]))
        table.add_row(Text(skips.cause), f"{len(skips.steps):,}", *ends, Text(names))
    return table


def _worst(facts: RunFacts) -> Table:
    table = _table("Worst modules, in fp16", "headroom", "underflow", "outputs' headroom", right={1, 2, 3})
    for module in worst_modules(facts)[:WORST_SHOWN]:
        gradients, outputs = module.gradients, module.outputs
        table.add_row(
            Text(shown(module.name)),
            headroom(gradients.headroom_bits) if gradients else "",
            percent(gradients.mean_flush) if gradients else "",
            headroom(outputs.headroom_bits) if outputs else "",
        )
    return table


def _table(*columns: str, right: set[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place in right else "left", overflow="fold")
    return table
