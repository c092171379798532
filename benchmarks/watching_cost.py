"""Measure what `castwise run` adds to steps of training in bf16 without a scaler.

    python -m benchmarks.watching_cost [--steps 200]

One process trains a GPT alone, another does so once more, and one under `castwise run` with each set of options. They
take turns, a step each. Under castwise, the time of a step that is spent in castwise's entry points is measured:
the functions that torch, or a layer around a function of torch, calls. Writes
benchmarks/results/watching_cost-cpu.json and the table in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from benchmarks import recording
from benchmarks.benchmark import shown
from benchmarks.pairing import ratio
from castwise._demo.gpt import BYTES, GPT, Size
from castwise._guard import ErrorBoundary
from castwise._invariants.checks import Checks
from castwise.diagnosis._loss_code import LossCode
from castwise.diagnosis._recording import Recording
from castwise.monitor._checked_steps import CheckedSteps

ALONE, AGAIN, DEFAULT = "alone", "alone again", "castwise run"
OPTIONS = {
    DEFAULT: (),
    "--snapshots": ("--snapshots",),
    "--guard": ("--guard",),
    "--spikes": ("--spikes",),
    "all three": ("--snapshots", "--guard", "--spikes"),
}
SHORT, LONG = Size(layers=4, heads=2, width=32, context=8, batch=4), Size(4, heads=4, width=64, context=64, batch=10)


class Case(NamedTuple):
    """What is trained, with and without castwise.

    Args:
        size: The size of the GPT.
        clips: Whether the script clips gradients, so that castwise computes no norm.
        options: Keys of `OPTIONS`.
    """

    size: Size
    clips: bool
    options: Sequence[str]


CASES = {
    "short step": Case(SHORT, False, tuple(OPTIONS)),
    "short step, clipped": Case(SHORT, True, (DEFAULT,)),
    "long step": Case(LONG, False, (DEFAULT, "all three")),
}
WARM = 60
"""Steps that are not measured: mistakes are looked for in the first twelve, and steps 1, 2, 4, ..., 64 are sampled."""
KINDS = "wall", "cpu"
ALL_PARTS = "gradients checked", "batch kept", "code of the loss", "mistakes", "invariants", "records"
CHECK, BATCH, LOSS, MISTAKES, INVARIANTS, RECORDS = ALL_PARTS
PARTS = {
    "castwise.diagnosis._backward_calls": CHECK,
    "castwise.monitor._checked_steps": CHECK,
    "castwise.diagnosis._loss_code": LOSS,
    "castwise.diagnosis": BATCH,
    "castwise.tracing": BATCH,
    "castwise._mistakes": MISTAKES,
    "castwise._invariants": INVARIANTS,
}
TIMED: tuple[tuple[type, str], ...] = (
    *((LossCode, name) for name in ("backward_begins", "forward_begins", "forward_ends", "take", "step_ends")),
    *((Checks, name) for name in ("before_step", "after_step", "step_known", "forward")),
    *((Recording, "take"), (CheckedSteps, "_before")),
)
"""Methods that entry points of another part call."""


class Inside:
    """Adds up the processor time in castwise's entry points, by part, without that of the entry points within."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._running: list[float] = []

    def watch(self) -> None:
        """Measure from now on: each entry point is called by a guard."""
        call = ErrorBoundary.call

        def timed(guard: ErrorBoundary, door: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self.time(_part(door), call, guard, door, *args, **kwargs)

        ErrorBoundary.call = timed  # type: ignore[method-assign]
        for owner, name in TIMED:
            method = getattr(owner, name)
            setattr(owner, name, _timed(self, _part(method), method))

    def time(self, part: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, and add its processor time to a part, without that of the functions timed within."""
        self._running.append(0.0)
        began = time.process_time()  # as of the step: what other processes take on a busy machine does not count
        try:
            return function(*args, **kwargs)
        finally:
            took = time.process_time() - began
            self.seconds[part] += took - self._running.pop()
            if self._running:
                self._running[-1] += took


def _timed(inside: Inside, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: inside.time(part, method, *args, **kwargs)


def _part(door: Callable[..., Any]) -> str:
    function: Any = getattr(door, "func", door)
    module = getattr(function, "__module__", "")
    return next((part for prefix, part in PARTS.items() if module.startswith(prefix)), RECORDS)


def train(case: Case) -> None:
    """Take a step for each line of the input, and print its seconds as a line."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inside, size = Inside(), case.size
    inside.watch()
    model = GPT(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    texts = torch.randint(BYTES, (1000 * size.batch, size.context + 1))
    loader = iter(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(texts), size.batch, shuffle=True))
    print(flush=True)
    for _ in sys.stdin:
        inside.seconds.clear()
        began, began_cpu = time.perf_counter(), time.process_time()
        (batch,) = next(loader)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if case.clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        print(json.dumps({"wall": wall, "cpu": cpu, "loss": loss.item(), "inside": inside.seconds}), flush=True)


class Trainer:
    """A process that trains."""

    def __init__(self, case: str, options: Sequence[str] | None, folder: str) -> None:
        run = [] if options is None else ["-m", "castwise", "run", "--out", folder, *options]
        command = [sys.executable, *run, "-m", "benchmarks.watching_cost", "--train", case]
        pipe = subprocess.PIPE
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def step(self) -> dict[str, Any]:
        """Take a step, and return what it took."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        taken: dict[str, Any] = json.loads(self._line())
        return taken

    def end(self) -> None:
        """End the process."""
        self._process.communicate()


def measure(name: str, steps: int) -> dict[str, Any]:
    """Return what a case costs."""
    options = CASES[name].options
    with tempfile.TemporaryDirectory() as folder:
        trainers = {ALONE: Trainer(name, None, folder), AGAIN: Trainer(name, None, folder)}
        trainers |= {each: Trainer(name, OPTIONS[each], folder) for each in options}
        taken: dict[str, list[dict[str, Any]]] = {each: [] for each in trainers}
        draw = random.Random(0)
        for number in range(WARM + steps):
            for each in draw.sample(list(trainers), len(trainers)):
                step = trainers[each].step()
                if number >= WARM:
                    taken[each].append(step)
        for trainer in trainers.values():
            trainer.end()
    losses = {each: [step["loss"] for step in of_each] for each, of_each in taken.items()}
    if any(of_each != losses[ALONE] for of_each in losses.values()):
        raise AssertionError(f"the losses differ: {losses}")
    alone = taken[ALONE]
    return {
        "cpu ms": median(step["cpu"] for step in alone) * 1e3,
        "steps": steps,
        AGAIN: {kind: ratio([s[kind] for s in taken[AGAIN]], [s[kind] for s in alone]) for kind in KINDS},
        "options": {each: summarized(taken[each], alone) for each in options},
    }


def summarized(steps: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the share of castwise in steps, by part, and the ratios of whole steps."""
    parts = sorted({part for step in steps for part in step["inside"]})
    inside = median(sum(step["inside"].values()) for step in steps)
    cpu = ratio([step["cpu"] for step in steps], [step["cpu"] for step in alone])
    return {
        "total ms": inside * 1e3,
        "share": inside / median(step["cpu"] for step in steps),
        "more": cpu["median"] - 1,
        "seconds": {part: median(step["inside"].get(part, 0.0) for step in steps) for part in parts},
        "mean cpu": sum(step["cpu"] for step in steps) / sum(step["cpu"] for step in alone),
        **{kind: ratio([s[kind] for s in steps], [s[kind] for s in alone]) for kind in KINDS},
    }


def table(record: dict[str, Any]) -> str:
    """Return the tables of a record."""
    lines = [
        recording.headline(record["machine"]),
        "",
        "| step | options | inside castwise | processor time (quartiles) | its mean | elapsed time (quartiles) |",
        "|---|---|---|---|---|---|",
    ]
    rows = []
    for name, case in record["cases"].items():
        step, again = f"{name}, {case['cpu ms']:.0f} ms", case[AGAIN]
        lines.append(f"| {step} | none, another process | - | {shown(again['cpu'])} | - | {shown(again['wall'])} |")
        for options, cost in case["options"].items():
            whole = f"{shown(cost['cpu'])} | {cost['mean cpu']:.3f} | {shown(cost['wall'])}"
            lines.append(f"| {step} | {options} | {cost['share']:.1%} | {whole} |")
            us = " | ".join(f"{cost['seconds'].get(part, 0.0) * 1e6:.0f}" for part in ALL_PARTS)
            rows.append(f"| {step} | {options} | {us} |")
    head = f"| step | options | {' | '.join(ALL_PARTS)} |"
    lines += ["", "Microseconds of castwise in a step, median:", "", head, "|---" * (2 + len(ALL_PARTS)) + "|"]
    return "\n".join([*lines, *rows])


def main() -> None:
    """Measure, or train for a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--train", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(CASES[arguments.train])
        return
    torch.set_num_threads(1)  # as in the processes that train, for the record
    cases: dict[str, Any] = {}
    for name in CASES:
        cases[name] = measure(name, arguments.steps)
        print(name, cases[name], flush=True)
    record = {"machine": recording.machine(), "cases": cases}
    recording.write("watching_cost-cpu", record, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
