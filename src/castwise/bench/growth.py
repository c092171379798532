"""How costs grow with the number of parameters, and with the number of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from castwise.bench import host_time, monitor_cost, weight_cache
from castwise.bench.benchmark import Benchmark, Record, Table
from castwise.bench.machine import why_it_does_not_fit
from castwise.bench.pairing import QUICK_S, Rounds
from castwise.bench.step_cost import Case, Shapes, needed_bytes, times_table, timings
from castwise.demo.corpus import Corpus, read_text
from castwise.demo.gpt import Size
from castwise.demo.settings import CASTWISE, Training

OPTIMIZER = "fused AdamW"
TENSORS = 100  # fixed while parameters grow
PARAMETERS = 1_000_000  # fixed while tensors grow
MILLION = 1_000_000
HOST = ("foreach SGD", "unscale_, then step + update")
WIDTHS_SQUARED = 48  # parameters per squared width, for weight_cache's MLP and for a GPT with four layers
CACHE_BYTES = 20  # per parameter: four models in fp32 while one is converted, and two with casts
MONITOR_BYTES = 4 * 16 + 8  # per parameter: four models with gradients and AdamW's state, and a sample's copies


@dataclass(frozen=True)
class Plan:
    """Rounds and sizes: millions of parameters for each measured cost, and numbers of tensors."""

    rounds: Rounds
    millions: tuple[int, ...]
    tensors: tuple[int, ...]
    cache_millions: tuple[int, ...]
    monitor_millions: tuple[int, ...]


def fits(needed: int, device: str, measured: Callable[[], Record]) -> Record:
    """Run a measurement that needs the given bytes, or return the reason why it was skipped."""
    reason = why_it_does_not_fit(needed, device)
    return {"skipped": reason} if reason else measured()


def step(parameters: int, tensors: int, device: str, rounds: Rounds) -> Record:
    """Measure optimizer steps on the given number of parameters in equal tensors."""
    shapes: Shapes = [(parameters // tensors,)] * tensors
    found = fits(needed_bytes(shapes, OPTIMIZER), device, lambda: timings(Case(shapes, OPTIMIZER, device), rounds))
    return {"parameters": parameters, "tensors": tensors, "optimizer": OPTIMIZER, **found}


def mlp(parameters: int) -> torch.nn.Sequential:
    """Return the weight cache's MLP with about the given number of parameters."""
    return weight_cache.mlp(round(math.sqrt(parameters / WIDTHS_SQUARED)))


def gpt_size(parameters: int) -> Size:
    """Return the size of a GPT with about the given number of parameters, for few tokens."""
    return Size(layers=4, heads=4, width=4 * round(math.sqrt(parameters / WIDTHS_SQUARED) / 4), context=64, batch=1)


def cache(parameters: int, device: str, rounds: Rounds) -> Record:
    """Measure inference of one row with an MLP of about the given size, under a WeightCache."""

    def measured() -> Record:
        model = mlp(parameters)
        x = torch.randn(1, next(model.parameters()).shape[1])
        return weight_cache.race_of(model, x, weight_cache.infer, device, rounds, trains=False)

    return fits(CACHE_BYTES * parameters, device, measured)


def monitor(parameters: int, corpus: Corpus, device: str, rounds: Rounds) -> Record:
    """Measure steps of a GPT of about the given size under a monitor, with few tokens, so that samples stand out."""
    training = Training("fp32", CASTWISE, gpt_size(parameters), 0)
    return fits(MONITOR_BYTES * parameters, device, lambda: monitor_cost.race_of(training, corpus, device, rounds))


def measure(device: str, plan: Plan) -> Record:
    """Measure all sizes."""
    optimizer, call = HOST
    corpus = Corpus(read_text(None), context=64)
    return {
        "parameters": [step(count * MILLION, TENSORS, device, plan.rounds) for count in plan.millions],
        "tensors": [step(PARAMETERS, count, device, plan.rounds) for count in plan.tensors],
        "host": {
            f"{count:,} tensors": host_time.race_of(optimizer, call, count, device, plan.rounds)
            for count in plan.tensors
        },
        "weight cache": {
            f"{count}M parameters": cache(count * MILLION, device, plan.rounds) for count in plan.cache_millions
        },
        "monitor": {
            f"{count}M parameters": monitor(count * MILLION, corpus, device, plan.rounds)
            for count in plan.monitor_millions
        },
    }


def tables(record: Record) -> list[Table]:
    """Return tables of each cost by size."""
    steps = [
        times_table(grows, {f"{result[grows]:,}": result for result in record[grows]}, above)
        for grows, above in (
            ("parameters", f"{OPTIMIZER}, {TENSORS} tensors, by number of parameters. "),
            ("tensors", f"{OPTIMIZER}, {PARAMETERS:,} parameters, by number of tensors. "),
        )
    ]
    others = [
        host_time.times_table(record["host"], f"Host time, {': '.join(HOST)}:"),
        weight_cache.times_table(record["weight cache"], "A WeightCache, inference of one row by the MLP:"),
        monitor_cost.times_table(record["monitor"], "A monitor, steps of a GPT with four layers on 64 tokens, fp32:"),
    ]
    return [*steps, *(table for table in others if table.rows or table.below)]


BENCHMARK = Benchmark(
    name="growth",
    title="How costs grow",
    about=(
        "The other benchmarks on models of many sizes: the calls of a step by number of parameters and of tensors, a "
        "WeightCache and a monitor by number of parameters (by number of tensors: `tensor_growth`). The costs of a "
        "region and of an import do not depend on the model. `training` has complete training steps, and `scale_out` "
        "has ranks with more layers."
    ),
    quick=Plan(
        rounds=Rounds(9, QUICK_S),
        millions=(1, 10),
        tensors=(10, 100, 1000),
        cache_millions=(1,),
        monitor_millions=(),
    ),
    full=Plan(
        rounds=Rounds(51, 15.0),
        millions=(1, 3, 10, 30, 100, 250, 500),
        tensors=(10, 100, 1000, 10_000),
        cache_millions=(1, 10, 100, 500),
        monitor_millions=(1, 10, 100, 500),
    ),
    measure=measure,
    tables=tables,
)
