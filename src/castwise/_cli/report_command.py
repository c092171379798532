"""`castwise report`: show a monitor's records as an HTML page or as text."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from castwise._cli.completion import RECORDS, RUNS
from castwise._files import replace
from castwise._terminal import new_console
from castwise._user_error import UserError

if TYPE_CHECKING:
    from castwise.monitor._recorded_run import Run

PAGE, WIDTH = "report.html", 120
SharedScript = Annotated[
    bool,
    typer.Option(
        "--shared-script",
        help="Load plotly.js (1 MB, written once) from a file in the page's folder, so that pages are small.",
    ),
]
_RULE = "\N{BOX DRAWINGS LIGHT HORIZONTAL}".encode()


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help=f"Folders (of a {RECORDS}, of a run, or of several runs: then the latest), or record files. [default: "
            f"{RUNS}]",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help=f"File to write. [default: {PAGE} in the first RUN]"),
    ] = None,
    text: Annotated[
        bool,
        typer.Option("--text", help="Print a text summary instead of writing a page; with -o, write it to FILE."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON summary; with -o, write it to FILE.")] = False,
    shared_script: SharedScript = False,
) -> None:
    """Write an HTML report of what happened to the numbers in one or more runs."""
    try:
        runs_found = [_run_with_records(run) for run in runs or [Path(RUNS)]]
        read = _read_all([file for _, files in runs_found for file in files])
        if as_json:
            _print_json(read, output)
        elif text:
            _print(read, output)
        else:
            first, _ = runs_found[0]
            page = output or (first if first.is_dir() else first.parent) / PAGE
            typer.echo(f"wrote {_write(read, page, shared_script)}")
    except UserError as error:
        typer.echo(f"castwise report: {error}", err=True)
        raise typer.Exit(2) from None


def _run_with_records(path: Path) -> tuple[Path, list[Path]]:
    """Return the latest run in a folder of runs, or another path unchanged, and its record files."""
    from castwise.monitor._record_file import FILE_NAME
    from castwise.monitor._run_files import run_with_records

    try:
        if not path.exists():
            raise UserError(f"there is no {path}: give the folder of a run, which has a {FILE_NAME}")
        run, files = run_with_records(path)
    except OSError as error:  # such as a name that is too long
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from None
    if not files:
        raise UserError(f"there is no {FILE_NAME} in {path}: castwise.Monitor(..., sinks=[{str(path)!r}]) writes one")
    return run, files


def _read_all(files: list[Path]) -> list[Run]:
    from castwise.monitor._run_files import read_runs

    try:
        return read_runs(files)
    except OSError as error:
        where = error.filename or files[0]
        raise UserError(f"cannot read {where}: {error.strerror}; check the file and its permissions") from None
    except (ValueError, KeyError) as error:
        raise UserError(str(error)) from None


def _write(runs: list[Run], page: Path, shared_script: bool) -> Path:
    from castwise.report._html_report import write_report

    try:
        return write_report(runs, page, shared_script=shared_script)
    except ImportError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"cannot write {error.filename or page}: {error.strerror}") from None


def _print(runs: list[Run], output: Path | None) -> None:
    from castwise._cli.report_text import print_runs

    if output is None:
        print_runs(runs, new_console(WIDTH))
        return
    text = io.StringIO()
    print_runs(runs, new_console(WIDTH, text))
    _write_text(text.getvalue(), output, _is_text)


def _print_json(runs: list[Run], output: Path | None) -> None:
    from castwise.report._summary import Summary

    text = json.dumps(Summary.of(runs).record(), indent=2)
    if output is None:
        typer.echo(text)
    else:
        _write_text(f"{text}\n", output, _is_json)


def _is_text(head: bytes) -> bool:
    return head.startswith(_RULE)  # above the first run


def _is_json(head: bytes) -> bool:
    return head.startswith(b'{\n  "report": ')


def _write_text(text: str, output: Path, is_ours: Callable[[bytes], bool]) -> None:
    try:
        replace(output, text.encode(errors="backslashreplace"), "a summary", is_ours)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None
    typer.echo(f"wrote {output}")
