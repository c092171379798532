"""What casting weights once saves: a region with a WeightCache against torch.autocast, in random order.

    python benchmarks/weight_cache.py [--device cpu] [--rounds 25]

Writes benchmarks/results/weight_cache-<device>.json and the table in benchmarks/README.md. Outputs and trained weights
are checked to be bit for bit those of torch.autocast.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

import castwise
import recording
from castwise.cli.demo.gpt import GPT, Size

BF16 = torch.bfloat16
GPT_SIZE = Size(layers=4, heads=8, width=512, context=64, batch=1)
Region = Callable[[], AbstractContextManager[object]]


def mlp(device: str) -> nn.Module:
    """6 x (1024 - 4096 - 1024)."""
    torch.manual_seed(0)
    blocks = [[nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)] for _ in range(6)]
    return nn.Sequential(*(layer for block in blocks for layer in block)).to(device)


def gpt(device: str) -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPT_SIZE).to(device)


def infer(model: nn.Module, x: torch.Tensor, region: Region) -> torch.Tensor:
    with torch.no_grad(), region():
        return model(x)  # type: ignore[no-any-return]


def decode(model: nn.Module, x: torch.Tensor, region: Region) -> torch.Tensor:
    """Generate 16 tokens one by one, each from all before it: nothing but the weights is cached."""
    for _ in range(16):
        logits = infer(model, x, region)
        x = torch.cat([x, logits[:, -1:].argmax(-1)], dim=1)
    return x


def train(model: nn.Module, x: torch.Tensor, region: Region, micro_batches: int) -> torch.Tensor:
    """One step, of gradients that are accumulated over some micro-batches."""
    for param in model.parameters():
        param.grad = None
    for _ in range(micro_batches):
        with region():
            loss = model(x).float().square().mean() / micro_batches
        loss.backward()
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), [param.grad for param in model.parameters()], alpha=-1e-3)
    return torch.cat([param.detach().flatten()[:100] for param in model.parameters()])


def measure(case: dict[str, Any], device: str, rounds: int) -> dict[str, Any]:
    """Run a case under each rival in random order; "converted" is the model in bf16, without any region."""
    x, run, is_training = case["x"].to(device), case["run"], case["training"]
    models = {name: case["model"](device) for name in ("torch", "castwise")}
    cache = castwise.WeightCache(models["castwise"])
    regions: dict[str, Region] = {
        "torch": lambda: torch.autocast(device, dtype=BF16),
        "castwise": lambda: castwise.autocast(device, dtype=BF16, weight_cache=cache),
    }
    functions = {name: lambda name=name: run(models[name], x, regions[name]) for name in models}
    if not is_training:
        converted = copy.deepcopy(models["torch"]).to(BF16)
        given = x.to(BF16) if x.is_floating_point() else x
        functions["converted"] = lambda: run(converted, given, lambda: torch.autocast(device, enabled=False))
    for _ in range(10):  # the first ones pay for fresh memory
        if not torch.equal(functions["castwise"](), functions["torch"]()):
            raise AssertionError(f"{case['name']}: the outputs differ")
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name in random.sample(list(functions), len(functions)):
            times[name].append(recording.seconds(functions[name], device))
    weights = sum(param.nbytes for param in models["castwise"].parameters())
    return {
        "seconds": {name: statistics.median(of_name) for name, of_name in times.items()},
        "torch / castwise": recording.ratio(times["torch"], times["castwise"]),
        "castwise / converted": None if is_training else recording.ratio(times["castwise"], times["converted"]),
        "bytes of copies / of weights": cache.report().nbytes / weights,
    }


def table(record: dict[str, Any]) -> str:
    lines = [
        recording.title(record["machine"]),
        "",
        "| | torch.autocast | WeightCache | model in bf16 | torch / castwise (quartiles) | castwise / model in bf16 "
        "| copies / weights |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in record["cases"].items():
        low, high = row["torch / castwise"]["quartiles"]
        converted = row["castwise / converted"]
        ours, theirs = (row["seconds"][library] * 1e3 for library in ("castwise", "torch"))
        in_bf16 = f"{row['seconds']['converted'] * 1e3:.1f} ms" if converted else "-"
        lines.append(
            f"| {name} | {theirs:.1f} ms | {ours:.1f} ms | {in_bf16} "
            f"| {row['torch / castwise']['median']:.2f} ({low:.2f} - {high:.2f}) "
            f"| {converted['median'] if converted else float('nan'):.3f} | {row['bytes of copies / of weights']:.3f} |"
        )
    return "\n".join(lines).replace("| nan |", "| - |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.manual_seed(0)
    cases: list[dict[str, Any]] = [
        {"name": f"MLP, inference, batch {n}", "model": mlp, "x": torch.randn(n, 1024), "run": infer, "training": False}
        for n in (1, 64)
    ]
    prompt = torch.randint(256, (1, 8))
    cases.append({"name": "GPT, 16 tokens decoded", "model": gpt, "x": prompt, "run": decode, "training": False})
    for count in (8, 1):
        cases.append(
            {
                "name": f"MLP, training, {count} micro-batches of 8",
                "model": mlp,
                "x": torch.randn(8, 1024),
                "run": lambda model, x, region, count=count: train(model, x, region, count),
                "training": True,
            }
        )
    record = {
        "machine": recording.machine(options.device),
        "cases": {case["name"]: measure(case, options.device, options.rounds) for case in cases},
    }
    recording.write(f"weight_cache-{options.device}", record, table(record))


if __name__ == "__main__":
    main()
