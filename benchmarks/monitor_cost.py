"""The cost of a monitor: steps of the demo without one, with one that does not sample them, and with one that does."""

from __future__ import annotations

import inspect
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.benchmark import Benchmark, Record, Table, left_out, shown
from benchmarks.pairing import QUICK_S, Rounds, compare, race, ratio
from benchmarks.training import why_not
from castwise._demo.corpus import Corpus, read_text
from castwise._demo.gpt import EMULATED, SIZES, Size
from castwise._demo.training import CASTWISE, Trainer, Training
from castwise.monitor import Monitor
from castwise.monitor._record_file import FILE_NAME

EVERY: int = inspect.signature(Monitor).parameters["every"].default
ALONE, ALONE_AGAIN, NOT_SAMPLED, SAMPLED = "alone", "alone again", "not sampled", "sampled"


@dataclass(frozen=True)
class Plan:
    """Rounds and sizes; a precision that the device emulates uses the demo's size for emulation."""

    rounds: Rounds
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")
    size: Size = SIZES["tiny"]


def race_of(training: Training, corpus: Corpus, device: str, rounds: Rounds) -> Record:
    """Time the same steps of the trainers in turns; the first sample, which is unconditional, is part of the warm-up.

    Raises:
        AssertionError: A monitor changed a loss.
    """
    where, names = torch.device(device), (ALONE, ALONE_AGAIN, NOT_SAMPLED, SAMPLED)
    trainers = {name: Trainer(training, corpus, where) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        with ExitStack() as monitors:
            for name, every in ((NOT_SAMPLED, 10**9), (SAMPLED, 1)):
                monitors.enter_context(trainers[name].monitor(every, Path(folder, name)))
            times = race({name: trainer.step for name, trainer in trainers.items()}, rounds, warm_up=5)
        records = Path(folder, SAMPLED, FILE_NAME).read_bytes().splitlines()
    losses = {name: trainer.losses for name, trainer in trainers.items()}
    if len(set(map(tuple, losses.values()))) > 1:
        raise AssertionError(f"{training.precision}: the losses differ: {losses}")
    sampled = ratio(times[SAMPLED], times[ALONE])
    return {
        "seconds": {name: statistics.median(of_name) for name, of_name in times.items()},
        "not sampled / alone": compare(times[NOT_SAMPLED], times[ALONE], ratio(times[ALONE_AGAIN], times[ALONE])),
        "sampled / alone": sampled,
        # The extra time of a sampled step, spread over all steps up to the next sample.
        "more at the default": (sampled["median"] - 1) / EVERY,
        "bytes of a sample": max(map(len, records)),
    }


def measure(device: str, plan: Plan) -> Record:
    """Measure each precision."""
    cases: Record = {}
    text = read_text(None)
    for precision in plan.precisions:
        size = EMULATED if why_not(precision, device) else plan.size
        training = Training(precision, CASTWISE, size, 0)
        case = race_of(training, Corpus(text, size.context), device, plan.rounds)
        cases[f"{precision}, {size.layers} layers of width {size.width}"] = case
    return {"cases": cases}


def tables(record: Record) -> list[Table]:
    """Return a table with one row per precision."""
    return [times_table(record["cases"])]


def times_table(cases: dict[str, Record], above: str = "") -> Table:
    """Build a table from results of `race_of`, by name, with reasons for skipped cases."""
    table = Table(
        [
            *("", "step alone", "not sampled / alone (quartiles)", "verdict", "sampled / alone (quartiles)"),
            *(f"cost of one sample in {EVERY} steps", "bytes per sample"),
        ],
        above=above,
        below=left_out(cases),
    )
    for name, row in cases.items():
        if "skipped" in row:
            continue
        between = row["not sampled / alone"]
        cells = [name, f"{row['seconds'][ALONE] * 1e3:.1f} ms", shown(between, 4), between["verdict"]]
        cells += [shown(row["sampled / alone"], 2), f"+{row['more at the default']:.2%}"]
        table.rows.append([*cells, f"{row['bytes of a sample']:,}"])
    return table


BENCHMARK = Benchmark(
    name="monitor_cost",
    title="A monitor's cost",
    about=(
        "Steps of the demo's GPT without a monitor, under a monitor that does not sample them, and under one that "
        "does. A sample reads every gradient and every module's output once and copies the weights. By default, one "
        f"step in {EVERY} is sampled. Records are written to a file, and losses are the same bit for bit."
    ),
    quick=Plan(rounds=Rounds(9, QUICK_S), precisions=("fp32", "fp16")),
    full=Plan(rounds=Rounds(40)),
    measure=measure,
    tables=tables,
)
