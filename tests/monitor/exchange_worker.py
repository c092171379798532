"""Trains a model under DDP and a monitor on several ranks, of which one does not do what the others do.

Run by `test_exchange.py`, once for each rank: `python exchange_worker.py RANK WORLD_SIZE FILE WHAT`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from tests.distributed.ranks import join
from torch import nn

import castwise
from castwise.monitor import Monitor
from castwise.monitor import _exchange as exchange
from castwise.monitor import _monitor as monitor
from castwise.monitor._sample import Sample

STEPS = 8
SHORT = 1.0  # seconds: long for ranks that come together, even on a busy machine


def fail(*_: object, **__: object) -> None:
    raise OSError("no such device")


class Other(nn.Sequential):
    """Another model, of another class."""


class CountedSample(Sample):
    """Counts the samples of a case."""

    made = 0

    def __init__(self, *given: Any) -> None:
        CountedSample.made += 1
        super().__init__(*given)


monitor.Sample = CountedSample  # type: ignore[misc]


def model(inputs: int = 3, kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    torch.manual_seed(0)
    return nn.parallel.DistributedDataParallel(kind(nn.Linear(inputs, 5), nn.ReLU(), nn.Linear(5, 2)))


class Training:
    """A model with its optimizer, scaler and monitor."""

    def __init__(self, net: nn.Module, every: int = 2, **options: Any) -> None:
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
        self.scaler = castwise.ShardedGradScaler("cpu", init_scale=2.0**4)
        self.records: list[dict[str, Any]] = []
        self.monitor = Monitor(net, self.optimizer, self.scaler, every=every, sinks=[self.records.append], **options)

    def step(self, number: int, rank: int) -> None:
        inputs = next(self.net.parameters()).shape[1]
        rows = torch.randn(4, inputs, generator=torch.Generator().manual_seed(10 * number + rank))
        if number == 5 and rank == 1:
            rows = rows * torch.nan
        self.optimizer.zero_grad()
        self.scaler.scale(self.net(rows).square().sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def result(self) -> dict[str, Any]:
        kinds = {kind: [r["step"] for r in self.records if r["kind"] == kind] for kind in ("step", "sample")}
        causes = [[r["cause"], r["rank"]] for r in self.records if r["kind"] == "step" and r["skipped"]]
        alone = [[r["step"], r["why"]] for r in self.records if r["kind"] == "alone"]
        samples = [r for r in self.records if r["kind"] == "sample"]
        elements = [sum(module["numel"] for module in sample["activations"].values()) for sample in samples]
        weights = [value for parameter in self.net.parameters() for value in parameter.flatten().tolist()]
        return {**kinds, "alone": alone, "causes": causes, "elements": elements, "weights": weights}


def misbehave(run: Training, what: str) -> None:
    """Do in the fourth step what the other ranks do not do."""
    ranks: Any = getattr(run.monitor, "_ranks", None)
    original: Any = Sample.measured
    if what == "sample fails":
        Sample.measured = fail  # type: ignore[method-assign]
    elif what == "sample is not made":
        Sample.measure_gradients = fail  # type: ignore[method-assign]
    elif what == "detached":
        run.monitor.detach()
    elif what == "late":
        Sample.measured = lambda *given: (time.sleep(0.3), original(*given))[1]  # type: ignore[method-assign,assignment]
    elif what == "busy":
        Sample.measured = lambda *given: (time.sleep(1.5 * SHORT), original(*given))[1]  # type: ignore[method-assign,assignment]
    elif what == "silent":
        ranks.reduce_sample = ranks.gather_faults = fail
    elif what == "forked":
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            ranks.reduce_sample(4, None)
            os._exit(0 if not ranks.combines_samples else 1)
        assert os.waitpid(child, 0)[1] == 0, "the child waited for ranks, or still combines"
    elif what == "fails in between":
        ranks._exchange.maximum = fail


def train(what: str, rank: int) -> dict[str, Any]:
    """Train while rank 1 does something else; return what this rank has recorded and its weights."""
    is_other = rank == 1
    run = Training(model(), every=4 if what == "every" and is_other else 2)
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    if what in ("no monitor", "too late to attach"):
        exchange.LIMIT = SHORT
        if is_other:
            store.wait([f"{what} 0"])
            store.wait([f"{what} 2"])
    if what == "late to attach" and is_other:
        time.sleep(0.3)
    if not (what == "none" or (what == "no monitor" and is_other)):
        run.monitor.attach()
    store.set(f"{what} {rank}", "attached")
    if what == "step" and is_other:
        run.monitor.step = 101
    for number in range(1, STEPS + 1):
        if number == 4:
            if what in ("silent", "busy") and not is_other:
                exchange.LIMIT = SHORT
            if is_other:
                misbehave(run, what)
        run.step(number, rank)
    result = {**run.result(), "made": CountedSample.made}
    if run.monitor._handles:
        run.monitor.detach()
    return result


def train_two(what: str, rank: int) -> dict[str, Any]:
    """Train two models, with monitors attached in another order on rank 1, or one only there."""
    is_other = rank == 1
    kind = Other if what == "another order" else nn.Sequential
    runs = [Training(model()), Training(model(2, kind))]
    wanted = [] if what == "none of two" else runs[1:] if is_other and what == "one of two" else runs
    for run in reversed(wanted) if is_other else wanted:
        if what == "one of two" and run is not wanted[0]:
            exchange.LIMIT = SHORT  # the second monitor waits in vain
        run.monitor.attach()
    exchange.LIMIT = SHORT
    for number in range(1, 5):
        for run in runs:
            run.step(number, rank)
    results = [run.result() for run in runs]
    for run in wanted:
        run.monitor.detach()
    return {"first": results[0], "second": results[1]}


def attach_again(rank: int) -> dict[str, Any]:
    """Attach twice on all ranks, a third time on rank 1 only, then on all again."""
    run = Training(model())
    numbers = []
    for count in range(4):
        if count == 2:
            exchange.LIMIT = SHORT
            if rank == 1:
                run.monitor.attach()
                run.monitor.detach()
            exchange.LIMIT = 10.0
            dist.barrier()
            continue
        run.records.clear()
        run.monitor.attach()
        run.step(count + 1, rank)
        numbers.append(run.result()["sample"])
        run.monitor.detach()
        dist.barrier()
    return {"samples": numbers, "weights": run.result()["weights"]}


def train_alone(what: str, rank: int) -> dict[str, Any]:
    """Train without collectives; rank 1 dies in the fourth step, or after it has attached."""
    run = Training(model().module)  # type: ignore[arg-type,union-attr]
    run.scaler = castwise.GradScaler("cpu", init_scale=2.0**4)
    run.monitor = Monitor(run.net, run.optimizer, run.scaler, every=2, sinks=[run.records.append])
    exchange.LIMIT = SHORT if what == "dies after attach" else 10.0
    run.monitor.attach()
    for number in range(1, STEPS + 1):
        if rank == 1 and number == (4 if what == "dies" else 1):
            os.kill(os.getpid(), signal.SIGKILL)
        run.step(number, 0)
    result = run.result()
    run.monitor.detach()
    return result


def maxima(rank: int) -> dict[str, Any]:
    """Exchange maxima at three steps; rank 1 is late for two of them, and too late for the third."""
    exchange.LIMIT = SHORT
    ranks, numbers, why = exchange.Exchange("maxima"), torch.tensor([rank]), ""
    try:
        for step in (1, 2, 3):
            if rank == 1:
                time.sleep(1.5 * SHORT if step < 3 else 6 * SHORT)
            ranks.maximum_of_step(step, numbers, 4 * SHORT)
    except exchange.NoExchangeError as error:
        why = str(error)
    ranks.close()
    return {"maximum": numbers.tolist(), "step": step, "why": why}


def main() -> None:
    rank, _, what = join(sys.argv)
    results = {}
    for case in what.split("; "):
        CountedSample.made = 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if case in ("none of two", "another order", "other shapes", "one of two"):
                result = train_two(case, rank)
            elif case.startswith("dies"):
                result = train_alone(case, rank)
            elif case == "attached again":
                result = attach_again(rank)
            elif case == "maxima":
                result = maxima(rank)
            else:
                result = train(case, rank)
        messages = [str(warning.message) for warning in caught if "monitor" in str(warning.message)]
        results[case] = {**result, "messages": messages}
        exchange.LIMIT = 10.0
        for name, original in ORIGINAL.items():
            setattr(Sample, name, original)
        if not case.startswith("dies"):
            dist.barrier()
    print(json.dumps(results), flush=True)
    os._exit(0)  # without destroying the group, whose ranks may be dead


ORIGINAL = {name: getattr(Sample, name) for name in ("measured", "measure_gradients")}

if __name__ == "__main__":
    main()
