"""Plant faults in small bf16 runs, and see whether castwise finds the spike of the loss and names its cause.

    python -m benchmarks.planted_spikes [--seeds 2] [--faulty 2] [--healthy 450] [--cost-only]

A byte-level GPT and a CNN are trained in bf16 autocast, with AdamW and SGD, with and without clipping, accumulation and
warm-up. Each fault is planted in a run of its own, which is the same as its healthy twin until then: once in step 220,
and once in step 70, where the loss still falls. Sigmas are those of the twin: how far the fault raises the loss over
the run's own noise. In step 70, where most of the losses' spread is their fall, the noise is that of the differences
from one step to the next. Writes benchmarks/results/planted_spikes-cpu.json and the table in benchmarks/README.md. A
healthy run is one that does not diverge: the learning rates are such that no configuration does without a fault.
`--cost-only` measures what the checks cost, and leaves the rest of the record as it is.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import multiprocessing
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import castwise
from benchmarks import recording
from castwise._invariants.checks import Checks

WARM, ONSET, STEPS = 150, 70, 84
"""Steps without a monitor before some faults, then the step of the fault under one, and the last."""
LENGTH, WIDTH = 16, 32
SIZES = {
    "0.04M": (WIDTH, LENGTH, 2, 16),
    "0.2M": (64, 32, 3, 16),
    "3M": (256, 128, 4, 8),
    "13M": (512, 128, 4, 8),
}
"""Of the GPT in measurements of cost: width, length, blocks and rows of a batch, by the number of parameters."""
REPEATS = {"0.04M": 3, "0.2M": 3, "3M": 2, "13M": 1}
"""How often each cost is measured; the measurement with the shortest steps counts."""
TEXT = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
IMAGES = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(7))


class Config(NamedTuple):
    """What is trained, and how."""

    model: str
    optimizer: str
    clips: bool
    micro_batches: int
    warms_up: bool
    seed: int


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the output."""
        rows, length, width = x.shape
        heads = [part.view(rows, length, 4, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).split(width, 2)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A small model of bytes."""

    def __init__(self, width: int = WIDTH, length: int = LENGTH, blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the output."""
        return self.head(self.blocks(self.tokens(x) + self.places.weight)).flatten(0, 1)


def cnn() -> nn.Module:
    """Return a small model of images of 8x8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(288, 10),
    )  # fmt: skip


Batch = tuple[torch.Tensor, torch.Tensor]


class Run:
    """A run of a configuration, with a fault or healthy."""

    def __init__(self, config: Config, fault: str = "") -> None:
        torch.manual_seed(config.seed)
        self.config, self.fault = config, fault
        self.draw = torch.Generator().manual_seed(100 + config.seed)
        self.planted = random.Random(f"{config} {fault}")
        self.model = GPT() if config.model == "GPT" else cnn()
        kind = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[config.optimizer]
        self.rate = 2e-3 if config.optimizer == "AdamW" else 0.05 if config.model == "GPT" else 0.02
        more = {} if config.optimizer == "AdamW" else {"momentum": 0.9}
        self.optimizer = kind(self.model.parameters(), lr=self.rate, **more)
        self.losses: list[float] = []
        self.parameter = ""
        self.done = 0

    def save(self) -> Any:
        """Return a copy of the state."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.draw.get_state(), self.done))

    def load(self, state: Any) -> Run:
        """Go on from a state; returns the run."""
        model, optimizer, draw, self.done = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.draw.set_state(draw)
        return self

    def batch(self) -> Batch:
        """Draw a micro-batch."""
        rows = (16 if self.config.model == "GPT" else 64) // self.config.micro_batches
        if self.config.model == "CNN":
            y = torch.randint(10, (rows,), generator=self.draw)
            return IMAGES[y] + 2.5 * torch.randn(rows, 1, 8, 8, generator=self.draw), y
        begins = torch.randint(len(TEXT) - LENGTH - 1, (rows,), generator=self.draw).tolist()
        x, y = (torch.stack([TEXT[i + by : i + by + LENGTH] for i in begins]) for by in (0, 1))
        return x, y.flatten()

    def step(self, number: int) -> None:
        """Take a step, with the fault if it is its turn."""
        rate = self.rate * (min(1.0, (self.done + number) / 30) if self.config.warms_up else 1.0)
        is_fault = number == ONSET
        if self.fault.startswith("rate") and ONSET <= number < ONSET + 3:
            rate *= float(self.fault.split()[-1])
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batches = [self.batch() for _ in range(self.config.micro_batches)]
        if is_fault and self.fault.startswith("batch"):
            batches = [self.bad(*batch) for batch in batches]
        if self.fault == "data" and number >= ONSET:
            batches = [self.shifted(*batch) for batch in batches]
        if is_fault:
            self.plant()
        losses = []
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.cross_entropy(self.model(x), y) / len(batches)
            loss.backward()
            losses.append(loss.item())
        if is_fault and self.fault == "gradient element":
            name, param = self.matrix()
            self.parameter = name
            index = int(param.grad.flatten().nonzero()[self.planted.randrange(param.grad.count_nonzero().item())])
            param.grad.view(-1)[index] *= 1e6
        if self.config.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(sum(losses))

    def bad(self, x: torch.Tensor, y: torch.Tensor) -> Batch:
        """Return a bad batch instead of one."""
        kind, draw = self.fault.split()[-1], torch.Generator().manual_seed(self.config.seed)
        classes = 10 if self.config.model == "CNN" else 256
        if kind == "labels":
            return x, torch.randint(classes, y.shape, generator=draw)
        if kind == "constant":
            return torch.full_like(x, 7), torch.randint(classes, y.shape, generator=draw)
        if kind == "padding":
            return torch.zeros_like(x), torch.zeros_like(y)
        return x, y.new_full(y.shape, -100).index_fill_(0, torch.tensor([0]), 3)  # one valid target

    def shifted(self, x: torch.Tensor, y: torch.Tensor) -> Batch:
        """Return a batch of other data instead of one."""
        return (x ^ 128, y ^ 128) if self.config.model == "GPT" else (x, (y + 1) % 10)

    def matrix(self) -> tuple[str, torch.Tensor]:
        """Draw a parameter."""
        return self.planted.choice([pair for pair in self.model.named_parameters() if pair[1].dim() >= 2])

    def plant(self) -> None:
        """Write weights, or the optimizer's state."""
        if self.fault == "state 1000":
            for state in self.optimizer.state.values():
                state["exp_avg" if self.config.optimizer == "AdamW" else "momentum_buffer"].mul_(1000.0)
        if not self.fault.startswith(("weights", "bit")):
            return
        self.parameter, param = self.matrix()
        if self.fault.startswith("weights"):
            param.data.mul_(float(self.fault.split()[-1]))
            return
        bits = param.data.view(-1).view(torch.int32)
        index = self.planted.randrange(len(bits))
        bits[index] ^= 1 << (30 if self.fault == "bit 30" else 23)


FAULTS = {
    **dict.fromkeys(("batch labels", "batch constant", "batch padding", "batch target"), "batch"),
    "data": "data",
    **dict.fromkeys(("rate 10", "rate 100"), "learning rate"),
    **dict.fromkeys(("weights 3", "weights 30"), "written weights"),
    **dict.fromkeys(("bit 30", "bit 23"), "flipped bit"),
    "gradient element": "gradient element",
    "state 1000": "weights",
}
"""The faults, with the cause that is to be named."""


def watched(run: Run, steps: int, after: Callable[[int], object] = lambda number: None) -> list[dict[str, Any]]:
    """Train under a monitor that looks for spikes, calling a function after each step, and return what it reports."""
    records: list[dict[str, Any]] = []
    with castwise.Monitor(run.model, run.optimizer, every=10**6, sinks=[records.append], spikes=True):
        for number in range(1, steps + 1):
            run.step(number)
            after(number)
            if not math.isfinite(run.losses[-1]):
                break
    return [record for record in records if record["kind"] == "invariant"]


def noise(losses: list[float], *, falls: bool) -> float:
    """Return one sigma of logarithms of losses, of their differences from one step to the next if they fall."""
    usual = [math.log(max(loss, 1e-30)) for loss in losses]
    values = [after - before for before, after in itertools.pairwise(usual)] if falls else usual
    middle = 0.0 if falls else median(values)
    return max(1.4826 * median(abs(value - middle) for value in values), 0.02)


def branch(run: Run, healthy: list[float], *, falls: bool) -> dict[str, Any]:
    """Return what became of a run with a fault: its size in sigmas, and what was reported of it."""
    reported = watched(run, STEPS)
    sigma = noise(healthy[: ONSET - 1][-64:], falls=falls)
    rises = [
        math.inf if not math.isfinite(loss) else math.log(max(loss, 1e-30) / max(twin, 1e-30)) / sigma
        for loss, twin in zip(run.losses[ONSET - 1 :], healthy[ONSET - 1 :], strict=False)
    ]
    spikes = [record for record in reported if (record["name"], record["severity"]) == ("loss-spike", "warning")]
    step = int(spikes[0]["text"].split(" at step ")[1].split(",")[0]) if spikes else None
    first = next((index for index, rise in enumerate(rises) if rise > 8.0), None)
    written = [record for record in reported if record["name"] == "written-weights"]
    named = spikes[0]["parameters"] if spikes else []
    return {
        "fault": run.fault,
        "sigmas": max(rises),
        "found": step is not None,
        "delay": None if step is None or first is None else step - ONSET - first,
        "cause": spikes[0]["text"].split("Cause: ")[1].split(". ")[0] if spikes else None,
        "right_parameter": named == [run.parameter],
        "right_event": any(record["parameters"] == [run.parameter] for record in written),
    }


def by_fault(branches: list[dict[str, Any]], least: float) -> dict[str, dict[str, Any]]:
    """Return counts over the branches of each fault, and over those of at least some sigmas."""
    return {fault: summarized([each for each in branches if each["fault"] == fault], least) for fault in FAULTS}


def summarized(branches: list[dict[str, Any]], least: float) -> dict[str, Any]:
    """Return counts over the branches of a fault."""
    large = [each for each in branches if least <= each["sigmas"] < math.inf]  # of an inf another check tells
    found = [each for each in large if each["found"]]
    cause = FAULTS[branches[0]["fault"]]
    return {
        "branches": len(branches),
        "median_sigmas": median(min(each["sigmas"], 999.0) for each in branches),
        "not_finite": sum(each["sigmas"] == math.inf for each in branches),
        "large": len(large),
        "found": len(found),
        "largest_delay": max((each["delay"] for each in found if each["delay"] is not None), default=None),
        "cause": cause,
        "right_cause": sum(each["cause"] == cause for each in found),
        "right_parameter": sum(each["right_parameter"] for each in found),
        "right_event": sum(each["right_event"] for each in branches),
    }


def cost(size: str) -> dict[str, dict[str, float]]:
    """Return the processor time of castwise's checks in a step of a GPT, and of the step, in milliseconds."""
    spent = [0.0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                spent[0] += time.process_time() - began

        return call

    kinds = {"default": {"invariants": True, "on_nonfinite": "diagnose"}, "spikes": {"spikes": True}}
    names = "before_step", "after_step", "step_known", "forward"
    kept = {name: getattr(Checks, name) for name in names}
    try:
        for name, method in kept.items():
            setattr(Checks, name, timed(method))
        measured = [
            (kind, cost_once(SIZES[size], spent, **options))
            for _ in range(REPEATS[size])
            for kind, options in kinds.items()
        ]
    finally:
        for name, method in kept.items():
            setattr(Checks, name, method)
    return {kind: min((c for k, c in measured if k == kind), key=lambda c: c["step_ms"]) for kind in kinds}


def cost_once(size: tuple[int, int, int, int], spent: list[float], **monitored: Any) -> dict[str, float]:
    """Return what `cost` does of one monitor, whose checks add their seconds to `spent`."""
    width, length, blocks, rows = size
    torch.manual_seed(0)
    model = GPT(width, length, blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randint(256, (rows, length)), torch.randint(256, (rows * length,))
    inside = whole = 0.0
    with castwise.Monitor(model, optimizer, every=10**6, **monitored):
        for number in range(1, 71):  # the last 50: as many as between two checks of all weights
            spent[0], began = 0.0, time.process_time()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if number > 20:
                inside, whole = inside + spent[0], whole + time.process_time() - began
    return {"checks_ms": 20.0 * inside, "step_ms": 20.0 * whole, "share": inside / (whole - inside)}


def cost_of_all() -> dict[str, Any]:
    """Return the cost for each size, and where and when it was measured."""
    before = os.getloadavg()[0]
    sizes = {size: cost(size) for size in SIZES}
    return {"machine": recording.machine(), "load": [round(before, 1), round(os.getloadavg()[0], 1)], "sizes": sizes}


def rows_of(faults: dict[str, Any], least: int) -> list[str]:
    """Return the table of faults."""
    rows = [
        f"| fault | planted | sigmas (median) | at least {least} sigmas | of these found | steps late | cause named "
        "| parameter named | write or bit named, any size |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for fault, found in faults.items():
        late = "-" if found["largest_delay"] is None else f"{found['largest_delay']}"
        has_parameter = fault.startswith(("weights", "bit", "gradient"))
        parameter = f"{found['right_parameter']}" if has_parameter else "-"
        event = f"{found['right_event']}" if fault.startswith(("weights", "bit")) else "-"
        rows.append(
            f"| {fault} | {found['branches']} | {found['median_sigmas']:.1f} | {found['large']} | {found['found']} "
            f"| {late} | {found['right_cause']} | {parameter} | {event} |"
        )
    return rows


def table(record: dict[str, Any]) -> str:
    """Return the tables of a record."""
    healthy, large, small = record["healthy"], record["from_8_sigmas"], record["below_4_sigmas"]
    falling = record["falling"]
    rows = [recording.headline(record["machine"]), "", *rows_of(record["faults"], 8)]
    rows += [
        "",
        f"False alarms in healthy runs: {healthy['alarms']} in {healthy['steps']:,} steps of {healthy['runs']} runs. "
        f"Of {large['branches']} faults from 8 sigmas on, {large['found']} were found, and of {small['branches']} "
        f"below 4 sigmas {small['found']}.",
        "",
        "In step 70 from the first on, in sigmas of the differences from one loss to the next:",
        "",
        *rows_of(falling["faults"], 12),
        "",
        f"Of {falling['from_12_sigmas']['branches']} faults from 12 sigmas on, "
        f"{falling['from_12_sigmas']['found']} were found.",
        "",
        f"{recording.headline(record['cost']['machine'])} load {' to '.join(map(str, record['cost']['load']))}",
        "",
        "| parameters of the GPT | checks | processor time in a step, ms | of a step without them |",
        "|---|---|---|---|",
        *(
            f"| {size} | {name} | {cost['checks_ms']:.3f} | {100.0 * cost['share']:.1f}% |"
            for size, costs in record["cost"]["sizes"].items()
            for name, cost in costs.items()
        ),
    ]
    return "\n".join(rows)


def configs(seeds: int) -> Iterator[Config]:
    """Yield configurations of both models and optimizers; clipping, accumulation and warm-up alternate."""
    for number, (model, optimizer, seed) in enumerate(
        itertools.product(("GPT", "CNN"), ("AdamW", "SGD"), range(seeds))
    ):
        yield Config(model, optimizer, number % 2 == 0, 1 + number // 2 % 2, number // 4 % 2 == 0, seed)


def main() -> None:
    """Plant, measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="healthy runs of each model and optimizer")
    parser.add_argument("--faulty", type=int, default=2, help="of these, the seeds that faults are planted in")
    parser.add_argument("--healthy", type=int, default=450, help="steps of each healthy run")
    parser.add_argument("--cost-only", action="store_true", help="measure only what the checks cost")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.cost_only:
        found = {
            **json.loads((recording.HERE / "results" / "planted_spikes-cpu.json").read_text()),
            "cost": cost_of_all(),
        }
    else:
        found = planted(options.seeds, options.faulty, options.healthy)
    recording.write("planted_spikes-cpu", found, table(found))


def of_config(config: Config, length: int, *, is_faulty: bool) -> dict[str, Any]:
    """Return false alarms in a healthy run of a configuration, and what became of its faults."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    healthy, states = Run(config), []
    reported = watched(healthy, length, lambda number: states.append(healthy.save()) if number == WARM else None)
    alarms = sum((each["name"], each["severity"]) == ("loss-spike", "warning") for each in reported)
    found: dict[str, Any] = {"alarms": alarms + sum(each["name"] == "written-weights" for each in reported)}
    found["trained"], found["falling"] = [], []
    for fault in FAULTS if is_faulty else ():
        later = Run(config, fault).load(states[0])
        later.done = WARM
        found["trained"].append(branch(later, healthy.losses[WARM:], falls=False))
        found["falling"].append(branch(Run(config, fault), healthy.losses, falls=True))
    print(config, found["alarms"], flush=True)
    return found


def planted(seeds: int, faulty: int, length: int) -> dict[str, Any]:
    """Return the record of healthy runs, and of faults."""
    every = [*configs(seeds)]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = [pool.submit(of_config, config, length, is_faulty=config.seed < faulty) for config in every]
        found = [run.result() for run in runs]
    trained, falling = ([each for run in found for each in run[phase]] for phase in ("trained", "falling"))
    small = [each for each in trained if each["sigmas"] < 4.0]
    return {
        "machine": recording.machine(),
        "healthy": {"runs": len(every), "steps": length * len(every), "alarms": sum(run["alarms"] for run in found)},
        "faults": by_fault(trained, 8.0),
        "from_8_sigmas": counted(trained, 8.0),
        "below_4_sigmas": {"branches": len(small), "found": sum(each["found"] for each in small)},
        "falling": {"faults": by_fault(falling, 12.0), "from_12_sigmas": counted(falling, 12.0)},
        "cost": cost_of_all(),
    }


def counted(branches: list[dict[str, Any]], least: float) -> dict[str, int]:
    """Return how many faults of at least some sigmas there were, and how many were found; of an inf others tell."""
    large = [each for each in branches if least <= each["sigmas"] < math.inf]
    return {"branches": len(large), "found": sum(each["found"] for each in large)}


if __name__ == "__main__":
    main()
