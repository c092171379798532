"""The body of `castwise demo`: takes options, returns an exit code, and reports user errors in one line."""

from __future__ import annotations

import gc
import json
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from castwise._demo.corpus import Corpus, read_text
from castwise._demo.gpt import EMULATED, SIZES
from castwise._demo.hardware import PRECISIONS, choose_device, emulated_precisions, make_deterministic
from castwise._demo.table import print_results
from castwise._demo.training import CASTWISE, MASTER_WEIGHTS, TORCH, Result, Trainer, Training
from castwise._installation.run_folder import RunFolder
from castwise._terminal import new_console, progress_bar
from castwise._user_error import UserError
from castwise.monitor._recorded_run import Run

LOG_WIDTH = 120
DIFFERENT, USER_ERROR, INTERRUPTED = 1, 2, 130
FP32, BF16_SPLIT = WEIGHTS = ("fp32", "bf16-split")
SAMPLE_EVERY = 5
REPORT = "report.html"


def demo(data: Path | None, steps: int, device: str | None, weights: str, out: Path, as_json: bool) -> None:
    """Train, print the results, and exit with a code."""
    console = new_console(LOG_WIDTH)
    console.quiet = as_json
    try:
        summary = run(data, steps, device, weights, out, console)
    except UserError as error:
        typer.echo(f"castwise demo: {error}", err=True)
        raise typer.Exit(USER_ERROR) from error
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would only add a traceback
        typer.echo("castwise demo: stopped", err=True)
        raise typer.Exit(INTERRUPTED) from interrupt
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    raise typer.Exit(0 if all(summary["identical"].values()) else DIFFERENT)


def run(data: Path | None, steps: int, device: str | None, weights: str, out: Path, console: Console) -> dict[str, Any]:
    """Train and print the results; return them as JSON-compatible values."""
    if steps < 1:
        raise UserError(f"--steps must be at least 1, got {steps}")
    if weights not in WEIGHTS:
        raise UserError(f"--weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    where = choose_device(device)
    corpus = Corpus(read_text(data), SIZES["tiny"].context)
    folder = _own_folder(out) if weights == FP32 else None
    warnings.filterwarnings("ignore", ".*its ops are emulated")  # a footnote of the table reports it
    make_deterministic(where)
    emulated = emulated_precisions(where)
    source = data or "Python's standard library"
    console.print(f"{corpus.n_bytes:,} bytes of {source}, {where}", soft_wrap=True)
    runs = runs_of(weights, steps, emulated)
    _warm_up(runs, corpus, where)
    results = [train(Trainer(training, corpus, where), console) for training in runs]
    results.sort(key=lambda result: result.training.order())
    identical = compared(results)
    print_results(console, results, identical, emulated)
    summary: dict[str, Any] = {"results": [_row(result) for result in results], "identical": identical}
    if folder is not None:
        console.print("fp16 castwise again, under a monitor ...")
        alone = results[-1]
        trainer = Trainer(alone.training, corpus, where)
        with trainer.monitor(SAMPLE_EVERY, folder):
            is_same = train(trainer, console).has_bits_of(alone)
        identical["fp16 castwise, monitored"] = is_same
        console.print(f"the monitor changed {'no' if is_same else 'SOME'} bits of losses and weights.")
        summary["report"] = _report(folder)
        console.print(f"report: {summary['report']}", soft_wrap=True)
    return summary


def runs_of(weights: str, steps: int, emulated: list[str]) -> list[Training]:
    """Return the training runs: every precision with both libraries, or bf16 with both kinds of weights.

    The libraries take turns at going first, because machines slow down as they heat up.
    """
    sizes = {name: EMULATED if name in emulated else SIZES["tiny"] for name in PRECISIONS}
    if weights == BF16_SPLIT:
        return [Training("bf16", library, sizes["bf16"], steps) for library in (CASTWISE, MASTER_WEIGHTS)]
    return [
        Training(precision, library, size, steps)
        for index, (precision, size) in enumerate(sizes.items())
        for library in ((TORCH, CASTWISE) if index % 2 == 0 else (CASTWISE, TORCH))
    ]


def _warm_up(runs: list[Training], corpus: Corpus, device: torch.device) -> None:
    """Take a small step of each kind, so that the first run is not slowed by loading torch's kernels."""
    for training in runs:
        Trainer(replace(training, size=EMULATED), corpus, device).step()
    # A process's first optimizer is kept alive by a cycle of torch's lazy imports; later ones are freed at once.
    gc.collect()


def train(trainer: Trainer, console: Console) -> Result:
    """Take all steps, with a progress bar in a terminal, and print a line."""
    training = trainer.training
    with progress_bar() as progress:
        for number in range(1, training.steps + 1):
            trainer.step()
            progress(f"{training.name}, loss {trainer.losses[-1]:.3f}", number, training.steps)
    console.print(f"{training.name:18} loss {trainer.losses[-1]:.3f} after {training.steps} steps")
    return trainer.result()


def compared(results: list[Result]) -> dict[str, bool]:
    """Return, by name, whether runs ended with the same bits as the first run of the same precision."""
    first: dict[str, Result] = {}
    identical = {}
    for result in results:
        reference = first.setdefault(result.training.precision, result)
        if reference is not result:
            identical[result.training.name] = result.has_bits_of(reference)
    return identical


def _row(result: Result) -> dict[str, object]:
    training = {"precision": result.training.precision, "library": result.training.library}
    numbers = ("loss", "step_ms", "tokens_per_s", "peak_bytes", "stored_bytes", "skipped")
    return training | {name: getattr(result, name) for name in numbers}


def _own_folder(out: Path) -> Path:
    """Create a folder for this demo alone.

    Raises:
        UserError: The folder cannot be created.
    """
    try:
        return RunFolder(out).make()
    except OSError as error:
        raise _cannot_write(out, error) from error


def _report(folder: Path) -> str:
    """Write the report of a folder's record, and return its path, or the reason why there is none."""
    from castwise.report._html_report import write_report

    try:
        return str(write_report([Run.read(folder)], folder / REPORT))
    except ImportError as error:
        return str(error)
    except OSError as error:
        raise _cannot_write(folder / REPORT, error) from error


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot write {path}: {error.strerror or error}")
