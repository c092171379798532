"""How costs grow with the number of parameters, and with the number of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks import monitor_cost, weight_cache
from benchmarks.benchmark import Benchmark, Record, Table
from benchmarks.machine import why_it_does_not_fit
from benchmarks.pairing import QUICK_S, Rounds
from benchmarks.step_cost import Case, Shapes, needed_bytes, times_table, timings
from castwise._demo.corpus import Corpus, read_text
from castwise._demo.gpt import GPT, Size
from castwise._demo.training import CASTWISE, Training

OPTIMIZER = "fused AdamW"
TENSORS = 100  # fixed while parameters grow
PARAMETERS = 1_000_000  # fixed while tensors grow
MILLION = 1_000_000
LAYERS = 4  # of the GPT while parameters grow
WIDTHS_SQUARED = 48  # parameters per squared width, for weight_cache's MLP and for a GPT with so many layers
PER_LAYER = 12  # tensors in a GPT layer
CACHE_BYTES = 20  # per parameter: four models in fp32 while one is converted, and two with casts
MONITOR_BYTES = 4 * 16 + 8  # per parameter: four models with gradients and AdamW's state, and a sample's copies


@dataclass(frozen=True)
class Plan:
    """Rounds and sizes: millions of parameters and numbers of tensors for each measured cost."""

    rounds: Rounds
    millions: tuple[int, ...]
    tensors: tuple[int, ...]
    cache_millions: tuple[int, ...]
    cache_tensors: tuple[int, ...]
    monitor_millions: tuple[int, ...]
    monitor_tensors: tuple[int, ...]


def fits(needed: int, device: str, measured: Callable[[], Record]) -> Record:
    """Run a measurement that needs the given bytes, or return the reason why it was skipped."""
    reason = why_it_does_not_fit(needed, device)
    return {"skipped": reason} if reason else measured()


def step(parameters: int, tensors: int, device: str, rounds: Rounds) -> Record:
    """Measure optimizer steps on the given number of parameters in equal tensors."""
    shapes: Shapes = [(parameters // tensors,)] * tensors
    found = fits(needed_bytes(shapes, OPTIMIZER), device, lambda: timings(Case(shapes, OPTIMIZER, device), rounds))
    return {"parameters": parameters, "tensors": tensors, "optimizer": OPTIMIZER, **found}


def mlp(parameters: int) -> nn.Sequential:
    """Return the weight cache's MLP with about the given number of parameters."""
    return weight_cache.mlp(round(math.sqrt(parameters / WIDTHS_SQUARED)))


def chain(parameters: int, tensors: int) -> nn.Sequential:
    """Return a chain of square matrices with about the given total number of parameters."""
    width = round(math.sqrt(parameters / tensors))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(tensors)))
    for param in model.parameters():
        nn.init.orthogonal_(param)  # otherwise the input would vanish after a few hundred layers
    return model


def gpt_size(parameters: int, tensors: int = PER_LAYER * LAYERS) -> Size:
    """Return the size of a GPT with about the given numbers of parameters and tensors, for few tokens."""
    layers = max(1, round(tensors / PER_LAYER))
    width = math.sqrt(parameters / WIDTHS_SQUARED * LAYERS / layers)
    return Size(layers=layers, heads=4, width=4 * max(1, round(width / 4)), context=64, batch=1)


def number_of_tensors(size: Size) -> int:
    """Return the number of parameter tensors of a GPT."""
    with torch.device("meta"):
        return len(list(GPT(size).parameters()))


def cache(model: nn.Sequential, device: str, rounds: Rounds) -> Record:
    """Measure inference of one row under a WeightCache."""
    x = torch.randn(1, next(model.parameters()).shape[1])
    return weight_cache.race_of(model, x, weight_cache.infer, device, rounds, trains=False)


def monitor(size: Size, corpus: Corpus, device: str, rounds: Rounds) -> Record:
    """Measure steps of a GPT under a monitor, with few tokens, so that samples stand out."""
    return monitor_cost.race_of(Training("fp32", CASTWISE, size, 0), corpus, device, rounds)


def measure(device: str, plan: Plan) -> Record:
    """Measure all sizes."""
    corpus, rounds = Corpus(read_text(None), context=64), plan.rounds
    caches: Record = {}
    for count in plan.cache_millions:
        parameters = count * MILLION
        caches[f"{count}M parameters"] = fits(
            CACHE_BYTES * parameters,
            device,
            lambda n=parameters: cache(mlp(n), device, rounds),  # type: ignore[misc]
        )
    monitors: Record = {}
    for count in plan.monitor_millions:
        parameters = count * MILLION
        monitors[f"{count}M parameters"] = fits(
            MONITOR_BYTES * parameters,
            device,
            lambda n=parameters: monitor(gpt_size(n), corpus, device, rounds),  # type: ignore[misc]
        )
    sizes = [gpt_size(PARAMETERS, count) for count in plan.monitor_tensors]
    return {
        "parameters": [step(count * MILLION, TENSORS, device, rounds) for count in plan.millions],
        "tensors": [step(PARAMETERS, count, device, rounds) for count in plan.tensors],
        "weight cache": caches,
        "weight cache, by tensors": {
            f"{count:,} tensors": cache(chain(PARAMETERS, count), device, rounds) for count in plan.cache_tensors
        },
        "monitor": monitors,
        "monitor, by tensors": {
            f"{number_of_tensors(size):,} tensors": monitor(size, corpus, device, rounds) for size in sizes
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
    of_caches = (
        ("weight cache", "A WeightCache, inference of one row by the MLP:"),
        ("weight cache, by tensors", "A WeightCache, inference of one row by a chain of matrices:"),
    )
    of_monitors = (
        ("monitor", f"A monitor, steps of a GPT with {LAYERS} layers on 64 tokens, fp32:"),
        ("monitor, by tensors", "A monitor, steps of a GPT on 64 tokens, fp32:"),
    )
    others = [weight_cache.times_table(record[key], above) for key, above in of_caches]
    others += [monitor_cost.times_table(record[key], above) for key, above in of_monitors]
    return [*steps, *(table for table in others if table.rows or table.below)]


BENCHMARK = Benchmark(
    name="growth",
    title="How costs grow",
    about=(
        "The other benchmarks on models of many sizes: the calls of a step, a WeightCache and a monitor, by number of "
        "parameters, and by number of tensors with about a million parameters. The cost of a region does not depend on "
        "the model. `training` has complete training steps, and `scale_out` has ranks with more layers."
    ),
    quick=Plan(
        rounds=Rounds(9, QUICK_S),
        millions=(1, 10),
        tensors=(10, 100, 1000),
        cache_millions=(1,),
        cache_tensors=(10, 100),
        monitor_millions=(),
        monitor_tensors=(),
    ),
    full=Plan(
        rounds=Rounds(51, 15.0),
        millions=(1, 3, 10, 30, 100, 250, 500),
        tensors=(10, 100, 1000, 10_000),
        cache_millions=(1, 10, 100, 500),
        cache_tensors=(10, 100, 1000, 10_000),
        monitor_millions=(1, 10, 100, 500),
        monitor_tensors=(10, 100, 1000, 10_000),
    ),
    measure=measure,
    tables=tables,
)
