"""`castwise doctor`: the formats this machine supports, their speed, and a recommendation."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

import castwise
from castwise._terminal import new_console, progress_bar

if TYPE_CHECKING:
    from castwise._doctor.checkup import Checkup


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Show which formats this machine supports, how fast each is, and which policy and schedule to use.

    Takes several seconds. Use an idle machine.
    """
    from castwise._doctor.checkup import examine

    with progress_bar() as progress:
        checkup = examine(progress)
    if as_json:
        typer.echo(json.dumps({"castwise": castwise.__version__, **checkup.as_dict()}, indent=2))
    else:
        _print(checkup)


def _print(checkup: Checkup) -> None:
    from castwise._doctor import checkup_text as text

    console = new_console(width=120)
    console.print(checkup.versions)
    for device in checkup.as_dict()["devices"]:
        console.rule(Text(f"{device['device']}: {device['name']}"))
        console.print(Text(text.facts_of(device)))
        console.print(_table(text.format_rows(device["formats"]), text.FORMAT_NUMBERS))
        console.print(Text(text.recipes_of(device["recipes"])))
        advice = Table.grid(padding=(0, 2))
        for what, choice, reason in text.advice_rows(device["recommendation"]):
            advice.add_row(what, Text(choice, style="bold"), Text(reason))
        console.print(advice)
    console.rule("notes")
    for note in checkup.notes:
        console.print(Text(f"{note.text} ").append(f"[{note.source}]", style="dim"))


def _table(rows: list[tuple[str, ...]], right: Collection[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for number, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if number in right else "left")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table
