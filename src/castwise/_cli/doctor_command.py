"""`castwise doctor`: the formats this machine supports, their speed, and a recommendation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

import castwise
from castwise._terminal import new_console, progress_bar

if TYPE_CHECKING:
    from castwise._doctor.checkup import Checkup

_COMPUTED = {True: "in hardware", False: "emulated", None: "unknown"}


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
    console = new_console(width=120)
    versions = f"castwise {castwise.__version__}, torch {checkup.torch}, Python {checkup.python}, {checkup.platform}"
    console.print(versions)
    for device in checkup.as_dict()["devices"]:
        console.rule(Text(f"{device['device']}: {device['name']}"))
        console.print(Text("; ".join(_facts(device))))
        console.print(_formats(device["formats"]))
        console.print(Text(_recipes(device["recipes"])))
        console.print(_advice(device["recommendation"]))
    console.rule("notes")
    for note in checkup.notes:
        console.print(Text(f"{note.text} ").append(f"[{note.source}]", style="dim"))


def _advice(recommended: dict[str, Any]) -> Table:
    policy, schedule = recommended["policy"], recommended["schedule"]
    table = Table.grid(padding=(0, 2))
    bold = Text(f"castwise.policies.{policy}" if policy else "none: stay in fp32", style="bold")
    table.add_row("policy", bold, Text(recommended["policy_reason"]))
    bold = Text(f"castwise.schedules.{schedule}()" if schedule else "none: no scaler", style="bold")
    table.add_row("schedule", bold, Text(recommended["schedule_reason"]))
    return table


def _facts(device: dict[str, Any]) -> list[str]:
    if device["device"] != "cpu":
        facts = [f"compute capability {'.'.join(map(str, device['capability']))}"] if device["capability"] else []
        return facts + ([f"{device['memory_bytes'] / 2**30:.1f} GiB"] if device["memory_bytes"] else [])
    threads, units = device["threads"], device["units"]
    facts = [f"{threads} thread{'s' * (threads != 1)}", f"torch's own kernels use {device['vectors']}"]
    facts += [f"{name} hardware: {', '.join(units[name]) or 'none'}" for name in units]
    return facts + ([f"limited by {device['limit']}"] if device["limit"] else [])


def _recipes(native: dict[str, bool]) -> str:
    kinds = {"recipes in hardware": True, "recipes emulated": False}
    named = {kind: [name for name in native if native[name] is by_units] for kind, by_units in kinds.items()}
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in named.items() if names)


def _formats(formats: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    columns = ("format", "computed", "GFLOP/s", "quartiles", "times fp32", "quartiles", "matrices", "verdict")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if 2 <= number <= 6 else "left")
    for entry in formats:
        start = [entry["format"], _COMPUTED[entry["native"]]]
        if entry["error"] is not None:
            table.add_row(*start, "", "", "", "", "", Text(entry["error"]))
            continue
        numbers = [text for name in ("gflops", "times_fp32") for text in _quartiles(entry[name])]
        verdict = "" if entry["format"] == "fp32" else entry["verdict"]
        table.add_row(*start, *numbers, f"{entry['size']} x {entry['size']}", verdict)
    return table


def _quartiles(rates: dict[str, float]) -> tuple[str, str]:
    low, median, high = (f"{rates[name]:,.{0 if rates[name] >= 100 else 2}f}" for name in ("low", "median", "high"))
    return median, f"{low} - {high}"
