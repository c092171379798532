"""The cost of `compare` and `tune`: time and memory relative to a forward and backward of the same model."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import castwise
from benchmarks.benchmark import Benchmark, Record, Table, shown
from benchmarks.pairing import QUICK_S, Rounds, race, ratio, seconds
from castwise._demo import gpt

ALONE, ONE, WITHOUT, TWO = "alone", "one policy", "one policy, no gradients", "two policies"
TUNED_FORMATS = ("bfloat16", "float32")


@dataclass(frozen=True)
class Plan:
    """Rounds and model size."""

    rounds: Rounds
    size: gpt.Size


def task(size: gpt.Size, device: str) -> tuple[gpt.GPT, list[tuple[Tensor, Tensor]]]:
    """Return a model and two batches."""
    torch.manual_seed(0)
    model = gpt.GPT(size).to(device)
    tokens = torch.randint(gpt.BYTES, (2, size.batch, size.context + 1), device=device)
    return model, [(each[:, :-1], each[:, 1:]) for each in tokens]


def measure(device: str, plan: Plan) -> Record:
    """Time a forward and backward against comparisons of the same batch, and count the forwards of a search."""
    model, batches = task(plan.size, device)
    bf16, stable = castwise.policies.bf16, castwise.policies.bf16_stable
    forwards = 0

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        nonlocal forwards
        forwards += 1
        return gpt.loss(logits, targets)

    def alone() -> None:
        inputs, targets = batches[0]
        torch.autograd.grad(gpt.loss(model(inputs), targets), list(model.parameters()))

    def comparing(*policies: castwise.Policy, gradients: bool = True) -> Callable[[], object]:
        named = {str(place): policy for place, policy in enumerate(policies)}
        return lambda: castwise.compare(model, batches[:1], named, loss=gpt.loss, gradients=gradients)

    runs: dict[str, Callable[[], object]] = {
        ALONE: alone,
        ONE: comparing(bf16),
        WITHOUT: comparing(bf16, gradients=False),
        TWO: comparing(bf16, stable),
    }
    timed = {name: _timed(run, device) for name, run in runs.items()}
    times = race(timed, plan.rounds, warm_up=1)
    best = castwise.tune(model, batches, loss=loss, formats=TUNED_FORMATS, tolerance=1e-5)
    record: Record = {
        "seconds": {name: statistics.median(of_name) for name, of_name in times.items()},
        "ratios": {name: ratio(times[name], times[ALONE]) for name in (ONE, WITHOUT, TWO)},
        "tune": {"modules": len(best.formats), "policies": best.evaluations, "forwards of a batch": forwards / 2},
    }
    if device == "cpu":
        record["bytes"] = {
            "largest output": largest_output(model, batches[0][0]),
            "weights": sum(param.nbytes for param in model.parameters()),
            "outputs kept": peak(lambda: keeping_outputs(model, alone)),
            **{name: peak(runs[name]) for name in (ALONE, ONE, TWO)},
        }
    return record


def _timed(run: Callable[[], object], device: str) -> Callable[[], float]:
    return lambda: seconds(run, device)


def largest_output(model: torch.nn.Module, inputs: Tensor) -> int:
    """Return the bytes of the largest tensor returned by a leaf module."""
    sizes: list[int] = []
    handles = [
        module.register_forward_hook(lambda module, args, output: sizes.append(output.nbytes))
        for module in model.modules()
        if not any(module.children())
    ]
    model(inputs)
    for handle in handles:
        handle.remove()
    return max(sizes)


def keeping_outputs(model: torch.nn.Module, run: Callable[[], object]) -> None:
    """Run a function while keeping all inputs and outputs of a model's modules until it ends."""
    kept: list[Any] = []
    handles = [
        module.register_forward_hook(lambda module, args, output: kept.append((args, output)))
        for module in model.modules()
    ]
    run()
    for handle in handles:
        handle.remove()


def peak(run: Callable[[], object]) -> int:
    """Return the peak of the bytes that a run allocates on the CPU, above those at its start."""
    with _without_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    now = most = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Suppress what torch's profiler writes to standard error when it starts and ends."""
    sys.stderr.flush()
    before = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nothing)


def tables(record: Record) -> list[Table]:
    """Return tables with a row for each kind of comparison."""
    times = Table(
        ["", "time", "/ forward and backward in fp32 (quartiles)"],
        [
            [name, f"{record['seconds'][name] * 1e3:,.0f} ms", shown(record["ratios"][name], 2)]
            for name in record["ratios"]
        ],
        below=(
            f"`tune` ran {record['tune']['policies']} policies for {record['tune']['modules']} modules: "
            f"{record['tune']['forwards of a batch']:.0f} forwards per batch, some of them with a backward."
        ),
    )
    if "bytes" not in record:
        return [times]
    found = record["bytes"]
    memory = Table(
        ["", "peak memory"],
        [
            ["forward and backward in fp32", _mib(found[ALONE])],
            ["the same, with the inputs and outputs of all modules kept", _mib(found["outputs kept"])],
            ["compare, one policy", _mib(found[ONE])],
            ["compare, two policies", _mib(found[TWO])],
        ],
        below=(
            f"The largest output of a module has {_mib(found['largest output'])}. The weights, which are copied to be "
            f"restored afterwards, have {_mib(found['weights'])}."
        ),
    )
    return [times, memory]


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


BENCHMARK = Benchmark(
    name="comparison_cost",
    title="The cost of a comparison",
    about="`castwise.compare` of bf16 with fp32 on one batch of the demo's GPT, and a search with `castwise.tune`.",
    quick=Plan(rounds=Rounds(9, QUICK_S), size=gpt.Size(layers=2, heads=4, width=128, context=64, batch=4)),
    full=Plan(rounds=Rounds(20), size=gpt.Size(layers=4, heads=4, width=256, context=128, batch=8)),
    measure=measure,
    tables=tables,
)
