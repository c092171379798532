"""`castwise fix`: correct the script of a run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from castwise._cli.completion import RUNS
from castwise._cli.report_command import _read_all, _run_with_records
from castwise._user_error import UserError

if TYPE_CHECKING:
    from castwise._fixing.corrections import Corrected
    from castwise.report._diagnosed import Diagnosed

_BY_HAND = 1


def fix(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, or of several runs: then the latest.")
    ] = Path(RUNS),
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the edits, with a copy of each script beside it.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --apply: also where git has changes that are not committed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a diff.")] = False,
) -> None:
    """Print the edits that correct what a run has found in its script, as a diff.

    Only what one place of the script decides: the rest is named, with the remedy, and the exit code is 1. An edit is
    tried by the next run.
    """
    try:
        if force and not apply:
            raise UserError("--force says what --apply may write: give --apply as well, or leave --force out")
        _, files = _run_with_records(run)
        from castwise._fixing.corrections import corrections, without_line  # loads torch, which takes seconds

        runs = _read_all(files)
        corrected, elsewhere = corrections(runs), without_line(runs)
        if apply:
            _write_all([script for script in corrected if script.edits], force)
    except UserError as error:
        typer.echo(f"castwise fix: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        left = [{"text": one.summary, "remedy": one.advice, "code": one.code} for one in elsewhere]
        scripts = [script.record() for script in corrected]
        typer.echo(json.dumps({"scripts": scripts, "without_line": left}, indent=2))
    else:
        _print(corrected, elsewhere, apply)
    if elsewhere or any(script.by_hand for script in corrected):
        raise typer.Exit(_BY_HAND)


def _print(corrected: list[Corrected], elsewhere: list[Diagnosed], applied: bool) -> None:
    """Print the diff, and to standard error what the edits correct and what is left."""
    for script in [] if applied else corrected:
        typer.echo(script.diff(), nl=False)
    for script in corrected:
        for finding in script.fixed:
            typer.echo(f"{script.path}:{finding.line}: {finding.text}", err=True)
    for script in corrected:
        for finding, why in script.by_hand:
            _print_by_hand(f"{script.path}:{finding.line}: {finding.text}", why, finding.remedy)
    for one in elsewhere:
        _print_by_hand(one.summary, "no line of the script is known for it", one.code or one.advice)
    if not applied and any(script.fixed and script.path.is_absolute() for script in corrected):
        typer.echo("castwise fix: for a diff that git applies, run it in the folder of the script", err=True)
    if not corrected and not elsewhere:
        typer.echo("castwise fix: the run has found nothing to edit in its script", err=True)
    if any(script.fixed for script in corrected):
        then = "run the script again to try them" if applied else "--apply writes them"
        typer.echo(f"castwise fix: {_edits(corrected)}; {then}", err=True)


def _print_by_hand(text: str, why: str, remedy: str) -> None:
    indented = remedy.replace("\n", "\n    ")
    typer.echo(f"{text}\n  by hand, because {why}:\n    {indented}", err=True)


def _edits(corrected: list[Corrected]) -> str:
    from castwise._number_text import several

    return several(sum(script.edits for script in corrected), "edit")


def _write_all(scripts: list[Corrected], force: bool) -> None:
    """Write scripts in place, each with a copy beside it, none if one has uncommitted changes or cannot be copied."""
    for script in [] if force else scripts:
        if why := _not_committed(script.path):
            raise UserError(f"{script.path} was left, because {why}: commit it, or give --force")
    copies: list[Path] = []
    try:
        for script in scripts:
            copies.append(_copied(script))
    except OSError as error:
        for copy in copies:
            copy.unlink()
        raise UserError(f"cannot write beside {script.path}: {error.strerror}; no script was changed") from None
    for place, (script, copy) in enumerate(zip(scripts, copies, strict=True)):
        try:
            _write(script, copy)
        except UserError:
            for unused in copies[place + 1 :]:
                unused.unlink()
            raise
        typer.echo(f"wrote {script.path}, with a copy in {copy}", err=True)


def _write(script: Corrected, copy: Path) -> None:
    try:
        with script.path.open("r+b") as file:  # in place: it keeps its owner, and its other names
            if file.read() != script.raw:
                raise UserError(
                    f"{script.path} is being changed by something else, and was left; run the command again"
                )
            file.seek(0)
            file.write(script.content())
            file.truncate()
    except OSError as error:
        raise UserError(f"cannot write {script.path}: {error.strerror}; {copy} has its text") from None


def _not_committed(path: Path) -> str:
    """Return why a script is not committed as it is; "" if it is, if it is in no repository, and without git."""
    options = ["--porcelain", "--ignored", "--untracked-files=all"]
    command = ["git", "--literal-pathspecs", "status", *options, "--", path.name]
    english, folder = {**os.environ, "LC_ALL": "C"}, path.resolve().parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False, text=True, env=english)
    except OSError:
        return ""
    if done.returncode:
        is_in_none = "not a git repository" in done.stderr
        return "" if is_in_none else f"git cannot tell ({' '.join(done.stderr.split())})"
    if done.stdout[:2] in ("??", "!!"):
        return "git does not have it"
    return "it has changes that are not committed" if done.stdout.strip() else ""


def _copied(script: Corrected) -> Path:
    """Write a copy of a script beside it, under a name that is free."""
    number = 0
    while True:
        copy = script.path.with_name(f"{script.path.name}.orig{number or ''}")
        try:
            file = copy.open("xb")
        except FileExistsError:
            number += 1
            continue
        try:
            with file:
                file.write(script.raw)
        except OSError:
            copy.unlink()
            raise
        return copy
