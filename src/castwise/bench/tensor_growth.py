"""How the costs of a WeightCache and a monitor grow with the number of parameter tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from castwise.bench import monitor_cost, weight_cache
from castwise.bench.benchmark import Benchmark, Record, Table
from castwise.bench.growth import PARAMETERS, WIDTHS_SQUARED
from castwise.bench.pairing import QUICK_S, Rounds
from castwise.demo.corpus import Corpus, read_text
from castwise.demo.gpt import GPT, Size
from castwise.demo.settings import CASTWISE, Training

PER_LAYER = 12  # tensors in a GPT layer
_LAYERS_OF_WIDTHS = 4  # number of layers that `WIDTHS_SQUARED` refers to


@dataclass(frozen=True)
class Plan:
    """Rounds and approximate numbers of tensors."""

    rounds: Rounds
    cached: tuple[int, ...]
    monitored: tuple[int, ...]


def chain(parameters: int, tensors: int) -> nn.Sequential:
    """Return a chain of square matrices with about the given total number of parameters."""
    width = round(math.sqrt(parameters / tensors))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(tensors)))
    for param in model.parameters():
        nn.init.orthogonal_(param)  # otherwise the input would vanish after a few hundred layers
    return model


def gpt_size(parameters: int, tensors: int) -> Size:
    """Return the size of a GPT with about the given numbers of parameters and tensors, for few tokens."""
    layers = max(1, round(tensors / PER_LAYER))
    width = math.sqrt(parameters / WIDTHS_SQUARED * _LAYERS_OF_WIDTHS / layers)
    return Size(layers=layers, heads=4, width=4 * max(1, round(width / 4)), context=64, batch=1)


def number_of_tensors(size: Size) -> int:
    """Return the number of parameter tensors of a GPT."""
    with torch.device("meta"):
        return len(list(GPT(size).parameters()))


def measure(device: str, plan: Plan) -> Record:
    """Measure for all numbers of tensors."""
    corpus = Corpus(read_text(None), context=64)
    cached, monitored = {}, {}
    for count in plan.cached:
        model = chain(PARAMETERS, count)
        x = torch.randn(1, next(model.parameters()).shape[1])
        race = weight_cache.race_of(model, x, weight_cache.infer, device, plan.rounds, trains=False)
        cached[f"{count:,} tensors"] = race
    for count in plan.monitored:
        size = gpt_size(PARAMETERS, count)
        training = Training("fp32", CASTWISE, size, 0)
        monitored[f"{number_of_tensors(size):,} tensors"] = monitor_cost.race_of(training, corpus, device, plan.rounds)
    return {"weight cache": cached, "monitor": monitored}


def tables(record: Record) -> list[Table]:
    """Return tables of both costs by number of tensors."""
    found = [
        weight_cache.times_table(record["weight cache"], "A WeightCache, inference of one row by a chain of matrices:"),
        monitor_cost.times_table(record["monitor"], "A monitor, steps of a GPT on 64 tokens, fp32:"),
    ]
    return [table for table in found if table.rows]


BENCHMARK = Benchmark(
    name="tensor_growth",
    title="Growth by number of tensors",
    about="A WeightCache and a monitor with about a million parameters, from few large tensors to many small ones.",
    quick=Plan(Rounds(9, QUICK_S), cached=(10, 100), monitored=()),
    full=Plan(Rounds(51, 15.0), cached=(10, 100, 1000, 10_000), monitored=(10, 100, 1000, 10_000)),
    measure=measure,
    tables=tables,
)
