"""`castwise report`: show a monitor's records as an HTML page or as text."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from castwise._files import replace
from castwise._terminal import new_console
from castwise._user_error import UserError
from castwise.cli.names import RECORDS

if TYPE_CHECKING:
    from castwise.monitor.run import Run

PAGE, WIDTH = "report.html", 120


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help=f"Run folders (with a {RECORDS}), folders of runs, or record files."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help=f"File to write. [default: {PAGE} in the first RUN]"),
    ] = None,
    text: Annotated[
        bool,
        typer.Option("--text", help="Print a text summary instead of writing a page; with -o, write it to FILE."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON summary; with -o, write it to FILE.")] = False,
) -> None:
    """Write an HTML report of what happened to the numbers in one or more runs."""
    try:
        read = _read_all([file for run in runs for file in _records_in(run)])
        if as_json:
            _print_json(read, output)
        elif text:
            _print(read, output)
        else:
            page = output or (runs[0] if runs[0].is_dir() else runs[0].parent) / PAGE
            typer.echo(f"wrote {_write(read, page)}")
    except UserError as error:
        typer.echo(f"castwise report: {error}", err=True)
        raise typer.Exit(2) from None


def _records_in(path: Path) -> list[Path]:
    """Return a run's record file, or those of all runs in a folder."""
    from castwise.monitor.sinks import FILE_NAME

    try:
        if not path.exists():
            raise UserError(f"there is no {path}: give the folder of a run, which has a {FILE_NAME}")
        if not path.is_dir():
            return [path]
        own = path / FILE_NAME
        found = [own] if own.is_file() else sorted(path.glob(f"*/{FILE_NAME}"))
    except OSError as error:  # such as a name that is too long
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from None
    if not found:
        raise UserError(f"there is no {FILE_NAME} in {path}: castwise.Monitor(..., sinks=[{str(path)!r}]) writes one")
    return found


def _read_all(files: list[Path]) -> list[Run]:
    from castwise.monitor.merged_ranks import merge_ranks

    return merge_ranks(map(_read, files))


def _read(file: Path) -> Run:
    from castwise.monitor.run import Run

    try:
        return Run.read(file)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; check the file and its permissions") from None
    except (ValueError, KeyError) as error:
        raise UserError(str(error)) from None


def _write(runs: list[Run], page: Path) -> Path:
    from castwise.report.report import write_report

    try:
        return write_report(runs, page)
    except ImportError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"cannot write {page}: {error.strerror}") from None


def _print(runs: list[Run], output: Path | None) -> None:
    from castwise.cli.report_text import print_runs

    if output is None:
        print_runs(runs, new_console(WIDTH))
        return
    text = io.StringIO()
    print_runs(runs, new_console(WIDTH, text))
    _write_text(text.getvalue(), output)


def _print_json(runs: list[Run], output: Path | None) -> None:
    from castwise.report.summary import Summary

    text = json.dumps(Summary.of(runs).record(), indent=2)
    if output is None:
        typer.echo(text)
    else:
        _write_text(f"{text}\n", output)


def _write_text(text: str, output: Path) -> None:
    try:
        replace(output, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None
    typer.echo(f"wrote {output}")
