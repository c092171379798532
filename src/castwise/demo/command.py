"""The body of `castwise demo`: takes options, returns an exit code, and reports user errors in one line."""

from __future__ import annotations

import json
import signal
import warnings
from pathlib import Path

import torch
import typer
from rich.console import Console

from castwise._terminal import new_console
from castwise._user_error import UserError
from castwise.demo import account
from castwise.demo.comparison import compare, verdicts, write_summary
from castwise.demo.corpus import Corpus, read_text
from castwise.demo.display import display_for
from castwise.demo.hardware import choose_device, emulated_precisions, make_deterministic
from castwise.demo.ranks import Ranks, is_first
from castwise.demo.run_folder import SETTINGS, create_run_folder, read_settings
from castwise.demo.settings import CASTWISE, FP32, Settings, size_of
from castwise.demo.table import print_results
from castwise.demo.training import Result, Trainer

LOG_WIDTH = 120
USER_ERROR, INTERRUPTED = 2, 130


def demo(
    context: typer.Context,
    data: Path | None,
    preset: str,
    steps: int,
    device: str | None,
    seed: int,
    strategy: str | None,
    weights: str,
    out: Path,
    checkpoint_every: int,
    resume: Path | None,
    as_json: bool,
) -> None:
    """Start or continue a run and return the exit code; `context` holds the options that were given."""
    folder = resume
    try:
        if folder is None:
            chosen = choose_device(device)
            with Ranks(strategy, chosen) as ranks:
                settings, corpus = _new(data, preset, steps, chosen, seed, checkpoint_every, weights, ranks)
                made = folder = ranks.first(lambda: create_run_folder(out, settings.to_json()))
                identical = _run(made, settings, corpus, ranks, as_json)
        else:
            _refuse_other_options(context)
            settings, corpus = _reopen(folder)
            with Ranks(settings.strategy, choose_device(settings.device)) as ranks:
                _refuse_other_processes(settings, ranks)
                identical = _run(folder, settings, corpus, ranks, as_json)
    except UserError as error:
        _say(str(error))
        raise typer.Exit(USER_ERROR) from error
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would only add a traceback
        advice = f"continue with: castwise demo --resume {folder}" if folder else "nothing was written yet"
        _say(f"stopped; {advice}")
        raise typer.Exit(INTERRUPTED) from interrupt
    raise typer.Exit(0 if identical else 1)


def _say(message: str) -> None:
    if is_first():
        typer.echo(f"castwise demo: {message}", err=True)


def _console(as_json: bool) -> Console:
    console = new_console(LOG_WIDTH)
    console.quiet = as_json or not is_first()
    return console


def _new(
    data: Path | None,
    preset: str,
    steps: int,
    device: torch.device,
    seed: int,
    checkpoint_every: int,
    weights: str,
    ranks: Ranks,
) -> tuple[Settings, Corpus]:
    context = size_of(preset).context
    corpus = Corpus(read_text(data), context)
    settings = Settings(
        data=None if data is None else str(data.resolve()),
        preset=preset,
        steps=steps,
        device=str(device),
        checkpoint_every=checkpoint_every,
        seed=seed,
        threads=torch.get_num_threads(),
        emulated=ranks.first(lambda: emulated_precisions(device)),
        strategy=ranks.strategy,
        processes=ranks.size,
        text_digest=corpus.digest,
        weights=weights,
    )
    return settings, corpus


def _reopen(folder: Path) -> tuple[Settings, Corpus]:
    settings = Settings.from_json(read_settings(folder), source=str(folder / SETTINGS))
    data = None if settings.data is None else Path(settings.data)
    corpus = Corpus(read_text(data), size_of(settings.preset).context)
    if corpus.digest != settings.text_digest:
        source = settings.data or "the standard library"
        raise UserError(f"the text of {source} has changed since {folder} was started: start a new run")
    return settings, corpus


def _refuse_other_options(context: typer.Context) -> None:
    """Raise UserError for any other option: a resumed run must keep its settings."""
    given = []
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in {"resume", "as_json"} and source is not None and source.name == "COMMANDLINE":
            given.append("--" + name.replace("_", "-"))
    if given:
        raise UserError(f"--resume uses the settings in the run's folder: omit {', '.join(given)}")


def _refuse_other_processes(settings: Settings, ranks: Ranks) -> None:
    if settings.processes != ranks.size:
        raise UserError(f"the run was started with {settings.processes} processes: resume it with the same number")


def _run(folder: Path, settings: Settings, corpus: Corpus, ranks: Ranks, as_json: bool) -> bool:
    """Train, then print and write the results; return True if all pairs are identical."""
    console = _console(as_json)
    torch.set_num_threads(settings.threads)
    warnings.filterwarnings("ignore", ".*its ops are emulated")  # a footnote of the table reports it
    make_deterministic(torch.device(settings.device))
    source = settings.data or "Python's standard library"
    where = settings.device if ranks.strategy is None else f"{settings.device}, {ranks.strategy} x {ranks.size}"
    console.print(f"{corpus.n_bytes:,} bytes of {source}, {where}, writing to {folder}", soft_wrap=True)
    results = compare(folder, settings, corpus, display_for(console), ranks)
    summary = ranks.first(lambda: write_summary(folder, settings, results))
    print_results(console, settings, results)
    has_account = ranks.strategy is None and settings.weights == FP32
    is_unchanged = not has_account or _account(folder, settings, corpus, ranks, results, console)
    console.print(f"results: {folder}", soft_wrap=True)
    if as_json and is_first():
        typer.echo(json.dumps({"folder": str(folder), "monitor_changed_nothing": is_unchanged, **summary}, indent=2))
    return all(verdicts(results).values()) and is_unchanged


def _account(
    folder: Path, settings: Settings, corpus: Corpus, ranks: Ranks, results: list[Result], console: Console
) -> bool:
    """Train again under a monitor and write a report; return True if the weights are the same as without it."""
    training = next(t for t in settings.runs() if (t.precision, t.library) == ("fp16", CASTWISE))
    expected = next(r.weights_sha256 for r in results if (r.precision, r.library) == ("fp16", CASTWISE))
    console.print("fp16 castwise again, under a monitor ...")
    trainer = Trainer(training, corpus, torch.device(settings.device), settings.seed, ranks)
    is_unchanged = account.train_under_monitor(folder, trainer) == expected
    console.print(f"the monitor changed {'no' if is_unchanged else 'SOME'} bits of the weights.")
    console.print(f"report: {account.report(folder)}", soft_wrap=True)
    return is_unchanged
