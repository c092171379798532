"""`castwise bench`: benchmark castwise against torch.amp on this machine."""

from __future__ import annotations

import json
import shlex
import signal
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from castwise._suggestions import nearest
from castwise._terminal import new_console, progress_bar
from castwise._user_error import UserError
from castwise.cli.names import BENCHMARKS, DEVICES, completing

if TYPE_CHECKING:
    from castwise.bench import benchmark

LOG_WIDTH = 140
FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130


def bench(
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="Run small sizes (two minutes on two cores) or all sizes.")
    ] = True,
    device: Annotated[
        str | None,
        typer.Option(
            metavar=f"[{'|'.join(DEVICES)}]",
            help="Device to measure on. [default: cuda if available, else cpu]",
            autocompletion=completing(*DEVICES),
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Benchmark to run; repeatable: {', '.join(BENCHMARKS)}. [default: all]",
            autocompletion=completing(*BENCHMARKS),
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the results.")] = Path("castwise-bench"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of tables.")] = False,
) -> None:
    """Benchmark castwise against torch.amp on this machine.

    Writes a JSON file for each benchmark, and README.md with the tables. Use an idle machine: on a busy one the verdict
    is "cannot tell".
    """
    from castwise.bench.catalogue import BENCHMARKS

    try:
        chosen = _chosen(only, BENCHMARKS)
        where = _device(device)
        _make(out)
        failed = _run(chosen, where, quick, _command(quick, device, only), out, BENCHMARKS, as_json)
    except UserError as error:
        typer.echo(f"castwise bench: {error}", err=True)
        raise typer.Exit(USER_ERROR) from None
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would only add a traceback
        typer.echo(f"castwise bench: stopped; finished results are in {out}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(FAILED if failed else 0)


def _chosen(
    names: list[str] | None, benchmarks: tuple[benchmark.Benchmark[Any], ...]
) -> list[benchmark.Benchmark[Any]]:
    known = [each.name for each in benchmarks]
    for name in names or []:
        if name not in known:
            raise UserError(f"--only must be one of {', '.join(known)}, got {name!r}{nearest(name, known)}")
    return [each for each in benchmarks if not names or each.name in names]


def _device(name: str | None) -> str:
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in DEVICES:
        raise UserError(f"--device must be one of {', '.join(DEVICES)}, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device; omit the option or use --device cpu")
    return name


def _make(folder: Path) -> None:
    from castwise.bench.recording import PAGE, is_not_ours

    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_taken = is_not_ours(folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from None
    if is_taken:
        raise UserError(f"{folder / PAGE} was not written by castwise bench: choose another --out")


def _command(quick: bool, device: str | None, only: list[str] | None) -> str:
    words = ["castwise", "bench", "--quick" if quick else "--full"]
    words += ["--device", device] if device else []
    return shlex.join([*words, *(word for name in only or [] for word in ("--only", name))])


def _run(
    chosen: list[benchmark.Benchmark[Any]],
    device: str,
    quick: bool,
    command: str,
    out: Path,
    all_: tuple[benchmark.Benchmark[Any], ...],
    as_json: bool,
) -> list[str]:
    """Run benchmarks in turn and return the names of those that failed; a failure does not stop the others."""
    from castwise.bench.machine import machine
    from castwise.bench.recording import doubt, file_of, headline, write

    console = new_console(LOG_WIDTH)
    console.quiet = as_json
    records: dict[str, Any] = {}
    console.print(headline(machine(device, command)).replace("`", ""))
    failed, doubts = [], []
    for done, each in enumerate(chosen):
        console.rule(Text(f"{each.title}: {each.name}"))
        start = time.perf_counter()
        try:
            with warnings.catch_warnings(), progress_bar() as progress:
                progress(each.name, done, len(chosen))
                warnings.simplefilter("ignore")  # about emulated fp16, and from torch's own classes
                measured = each.measure(device, each.quick if quick else each.full)
        except Exception:
            failed.append(each.name)
            typer.echo(f"castwise bench: {each.name} failed:\n{traceback.format_exc()}", err=True)
            continue
        taken = time.perf_counter() - start
        about = machine("cpu" if each.on_cpu_alone else device, command)
        records[each.name] = {"machine": about, "took_s": round(taken, 1), **measured}
        write(out, file_of(each, device), records[each.name], all_)
        for table in each.tables(measured):
            _print(console, table)
        console.print(Text(f"{each.about} Took {taken:.0f} s.", style="dim"))
        unclear = doubt(measured)
        doubts += [f"{each.name}: {unclear}"] if unclear else []
    _warn_if_unclear(doubts, quick)
    console.print(f"results: {out}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(records, indent=2))
    return failed


def _print(console: Console, table: benchmark.Table) -> None:
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for place, column in enumerate(table.columns):
        shown.add_column(Text(column), justify="right" if place else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    for part in (table.above, shown, table.below):
        if part:
            console.print(part)


def _warn_if_unclear(doubts: list[str], quick: bool) -> None:
    if doubts:
        advice = "stop other programs" + (", or use --full" if quick else "")
        typer.echo(
            "\n  ".join([f"warning: this machine is too noisy for some comparisons; {advice}", *doubts]), err=True
        )
