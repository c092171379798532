"""The time saved by casting weights once: a region with a WeightCache against torch.autocast."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import castwise
from benchmarks.benchmark import Benchmark, Record, Table, left_out, shown
from benchmarks.pairing import AGAIN, CASTWISE, QUICK_S, TORCH, Rounds, compare, race, ratio, seconds
from castwise._demo.gpt import GPT, Size

BF16 = torch.bfloat16
GPT_SIZE = Size(layers=4, heads=8, width=512, context=64, batch=1)
IN_BF16 = "converted"  # the model itself, without any region
Region = Callable[[], AbstractContextManager[object]]
Run = Callable[[nn.Module, Tensor, Region], Tensor]


@dataclass(frozen=True)
class Plan:
    """Rounds, the MLP's width, the GPT's size, tokens to decode, and micro-batches per training step."""

    rounds: Rounds
    width: int = 1024
    gpt: Size = GPT_SIZE
    tokens: int = 16
    batches: tuple[int, ...] = (1, 64)
    micro_batches: tuple[int, ...] = (8, 1)


def mlp(width: int) -> nn.Sequential:
    """Return six MLP blocks of width - 4 width - width."""
    torch.manual_seed(0)
    blocks = [[nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)] for _ in range(6)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


def infer(model: nn.Module, x: Tensor, region: Region) -> Tensor:
    """Run a forward without gradients."""
    with torch.no_grad(), region():
        result: Tensor = model(x)
    return result


def decode(n_tokens: int) -> Run:
    """Return a run that generates tokens one by one, each from all tokens before it; only weights are cached."""

    def run(model: nn.Module, x: Tensor, region: Region) -> Tensor:
        for _ in range(n_tokens):
            logits = infer(model, x, region)
            x = torch.cat([x, logits[:, -1:].argmax(-1)], dim=1)
        return x

    return run


def train(micro_batches: int) -> Run:
    """Return a run that takes one step with gradients accumulated over micro-batches."""

    def run(model: nn.Module, x: Tensor, region: Region) -> Tensor:
        params: list[Tensor] = list(model.parameters())
        for param in params:
            param.grad = None
        for _ in range(micro_batches):
            with region():
                loss = model(x).float().square().mean() / micro_batches
            loss.backward()
        with torch.no_grad():
            torch._foreach_add_(params, [param.grad for param in params if param.grad is not None], alpha=-1e-3)
        return torch.cat([param.detach().flatten()[:100] for param in params])

    return run


def race_of(model: nn.Module, x: Tensor, run: Run, device: str, rounds: Rounds, trains: bool) -> Record:
    """Time the ways of running a model in turns; torch's and castwise's models are copies of the same weights.

    Raises:
        AssertionError: The outputs are not bit-identical.
    """
    models = {name: copy.deepcopy(model).to(device) for name in (TORCH, CASTWISE)}
    x = x.to(device)
    cache = castwise.WeightCache(models[CASTWISE])

    def by_torch() -> Tensor:
        return run(models[TORCH], x, lambda: torch.autocast(device, dtype=BF16))

    def by_castwise() -> Tensor:
        return run(models[CASTWISE], x, lambda: castwise.autocast(device, dtype=BF16, weight_cache=cache))

    for _ in range(3):  # the first ones allocate memory
        if not torch.equal(by_castwise(), by_torch()):
            raise AssertionError("the outputs of castwise and torch.amp differ")
    rivals: dict[str, Callable[[], Tensor]] = {TORCH: by_torch, AGAIN: by_torch, CASTWISE: by_castwise}
    if not trains:
        converted = copy.deepcopy(model).to(device, BF16)
        given = x.to(BF16) if x.is_floating_point() else x
        rivals[IN_BF16] = lambda: run(converted, given, lambda: torch.autocast(device, enabled=False))

    def timed(call: Callable[[], Tensor]) -> Callable[[], float]:
        return lambda: seconds(call, device)

    times = race({name: timed(call) for name, call in rivals.items()}, rounds)
    weights = sum(param.nbytes for param in model.parameters())
    return {
        "seconds": {name: statistics.median(of_name) for name, of_name in times.items()},
        "torch / castwise": ratio(times[TORCH], times[CASTWISE]),
        "castwise / torch": compare(times[CASTWISE], times[TORCH], ratio(times[AGAIN], times[TORCH])),
        "castwise / converted": None if trains else ratio(times[CASTWISE], times[IN_BF16]),
        "bytes of copies / of weights": cache.report().nbytes / weights,
    }


def measure(device: str, plan: Plan) -> Record:
    """Measure inference, decoding and training."""
    cases: Record = {}
    blocks = mlp(plan.width)
    for batch in plan.batches:
        x = torch.randn(batch, plan.width)
        cases[f"MLP, inference, batch {batch}"] = race_of(blocks, x, infer, device, plan.rounds, trains=False)
    torch.manual_seed(0)
    prompt = torch.randint(256, (1, 8))
    decoding = race_of(GPT(plan.gpt), prompt, decode(plan.tokens), device, plan.rounds, trains=False)
    cases[f"GPT, {plan.tokens} tokens decoded"] = decoding
    x = torch.randn(8, plan.width)
    for count in plan.micro_batches:
        training = race_of(blocks, x, train(count), device, plan.rounds, trains=True)
        cases[f"MLP, training, {count} micro-batches of 8"] = training
    return {"cases": cases}


def tables(record: Record) -> list[Table]:
    """Return a table with one row per case."""
    return [times_table(record["cases"])]


def times_table(cases: dict[str, Record], above: str = "") -> Table:
    """Build a table from results of `race_of`, by name, with reasons for skipped cases."""
    table = Table(
        [
            *("", "torch.autocast", "WeightCache", "model in bf16", "torch / castwise (quartiles)", "verdict"),
            *("castwise / model in bf16", "copies / weights"),
        ],
        above=above,
        below=left_out(cases),
    )
    for name, row in cases.items():
        if "skipped" in row:
            continue
        converted = row["castwise / converted"]
        cells = [name, *(f"{row['seconds'][library] * 1e3:.1f} ms" for library in (TORCH, CASTWISE))]
        cells += [f"{row['seconds'][IN_BF16] * 1e3:.1f} ms" if converted else "-"]
        cells += [shown(row["torch / castwise"], 2), row["castwise / torch"]["verdict"]]
        cells += [f"{converted['median']:.3f}" if converted else "-"]
        table.rows.append([*cells, f"{row['bytes of copies / of weights']:.3f}"])
    return table


BENCHMARK = Benchmark(
    name="weight_cache",
    title="Weights cast once",
    about="The MLP has six blocks of 1024 - 4096 - 1024. Outputs and trained weights equal those of torch.autocast bit "
    "for bit. With one micro-batch per step there is no cast to save. On a CPU, that row mostly measures how malloc "
    "frees and allocates gradients, so it changes with the number of threads and the settings of malloc. With torch "
    "2.13 and 2.15, a forward runs the same ops and Python functions, and its CPU time compared with the model in bf16 "
    "is about the same. On a busy machine, it is torch.autocast that takes longer, because it reads all weights in "
    "fp32 and writes them in bf16 for every forward.",
    quick=Plan(rounds=Rounds(9, QUICK_S), batches=(1,), micro_batches=(1,)),
    full=Plan(rounds=Rounds(25)),
    measure=measure,
    tables=tables,
)
