"""Does a model learn by recipes of 8 and 4 bits what it learns in bf16, and what does emulating them cost?

    pip install scipy
    python benchmarks/recipes.py

Trains the demo's GPT from the same weights on the same batches, with five seeds each: in bf16, and with all linear
layers of its blocks by each recipe, or all but those of the last block. What is compared is the loss of held-out data
at the end. Then times a step of the demo's model by each recipe against one in bf16, in turns. At last `castwise.tune`
is given models in which one layer cannot take a recipe: its input has a channel that is larger than all others by far.
Writes the results to benchmarks/results/recipes-cpu.json and the tables to benchmarks/README.md. Takes about ten
minutes on two quiet cores.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any, NamedTuple

import scipy
import torch
from torch import nn

import castwise
import recording
from castwise.bench.recording import headline
from castwise.demo.corpus import Corpus, derive_seed, read_text
from castwise.demo.gpt import GPT, SIZES, Size
from castwise.demo.gpt import loss as loss_of_text
from castwise.policy.module_rules import decide
from castwise.recipes.recipe import RECIPES
from fidelity import difference, spread

SEEDS = range(5)
STEPS, WINDOW = 300, 25
VALIDATION_BATCHES = 16
# Of a width that all recipes take: blocks of 128.
SIZE = Size(layers=2, heads=4, width=128, context=64, batch=8)
LEARNING_RATE = 1e-3
BF16 = "bf16"
LAST_IN_BF16 = ", last block in bf16"
METHODS = [BF16, *(f"{recipe}{how}" for recipe in RECIPES for how in ("", LAST_IN_BF16))]
TURNS = 15
WIDTH, CLASSES, OUTLIER, MODELS = 64, 16, 1e6, 100
STEPS_TIMED = {"tiny": TURNS, "small": 5}


class Outcome(NamedTuple):
    """A finished training run: the loss of each step, and of held-out data."""

    losses: list[float]
    held_out: float


def policy_of(method: str, last: int) -> castwise.Policy:
    """Return the policy of a method, for a model whose last block has this number."""
    recipe = method.removesuffix(LAST_IN_BF16)
    rules = {} if method == BF16 else {"blocks": recipe}
    if method.endswith(LAST_IN_BF16):
        rules[f"blocks.{last}"] = "bfloat16"
    return castwise.Policy(compute="bfloat16", modules=rules, backend="emulated")


def train(method: str, seed: int, steps: int = STEPS) -> Outcome:
    torch.set_num_threads(1)  # the model is too small to be shared
    corpus = Corpus(read_text(None), SIZE.context)
    torch.manual_seed(derive_seed(seed, "weights"))
    model = GPT(SIZE)
    bound = policy_of(method, SIZE.layers - 1).bind(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        tokens, targets = corpus.batch(SIZE, seed, step)
        optimizer.zero_grad()
        with castwise.autocast("cpu", policy=bound):
            loss = loss_of_text(model(tokens), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad(), castwise.autocast("cpu", policy=bound):
        held_out = [loss_of_text(model(x), y).item() for x, y in corpus.validation(SIZE, VALIDATION_BATCHES)]
    return Outcome(losses, statistics.fmean(held_out))


def measure(pool: Executor, seeds: Sequence[int], steps: int = STEPS) -> dict[str, Any]:
    """Train by all methods and with all seeds."""
    asked = {method: [pool.submit(train, method, seed, steps) for seed in seeds] for method in METHODS}
    outcomes = {method: [future.result() for future in futures] for method, futures in asked.items()}
    reference = [each.held_out for each in outcomes[BF16]]
    return {
        method: {
            **spread([each.held_out for each in of_method]),
            **({} if method == BF16 else {"minus bf16": difference([each.held_out for each in of_method], reference)}),
            "training loss, means of 25 steps": windows([each.losses for each in of_method]),
        }
        for method, of_method in outcomes.items()
    }


def windows(losses: Sequence[Sequence[float]]) -> list[float]:
    """Return the means over seeds and 25 steps."""
    by_step = [statistics.fmean(of_seeds) for of_seeds in zip(*losses, strict=True)]
    return [round(statistics.fmean(by_step[begin : begin + WINDOW]), 5) for begin in range(0, len(by_step), WINDOW)]


def step_of(method: str, size: Size) -> Callable[[], float]:
    """Return what trains for a step and says how many seconds it took."""
    torch.manual_seed(0)
    model = GPT(size)
    bound = policy_of(method, size.layers - 1).bind(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens, targets = torch.randint(256, (2, size.batch, size.context))

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        with castwise.autocast("cpu", policy=bound):
            loss = loss_of_text(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return time.perf_counter() - start

    step()
    return step


def cost(name: str, turns: int) -> dict[str, Any]:
    """Return the times of a step by recipe in multiples of one in bf16 of the same turn: median and quartiles."""
    steps = {method: step_of(method, SIZES[name]) for method in (BF16, *RECIPES)}
    seconds: dict[str, list[float]] = {method: [] for method in steps}
    for _ in range(turns):
        for method, step in steps.items():
            seconds[method].append(step())
    ratios = {
        recipe: [own / bf16 for own, bf16 in zip(seconds[recipe], seconds[BF16], strict=True)] for recipe in RECIPES
    }
    return {
        "bf16, s": round(statistics.median(seconds[BF16]), 4),
        "turns": turns,
        "times bf16": {
            recipe: [round(each, 3) for each in statistics.quantiles(of_recipe, n=4, method="inclusive")]
            for recipe, of_recipe in ratios.items()
        },
    }


class Planted(nn.Module):
    """An MLP of four linear layers, one of which is given a channel that takes the precision from all others."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(derive_seed(seed, "planted"))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.culprit, channel = int(torch.randint(4, ())), int(torch.randint(WIDTH, ()))
        self.register_buffer("gain", torch.ones(WIDTH))
        self.gain[channel] = OUTLIER
        with torch.no_grad():
            for layer in (*self.layers, self.head):
                nn.init.orthogonal_(layer.weight, 1.6)
            self.head.weight *= 1.5  # a loss that depends on what layers compute
            self.layers[self.culprit].weight[:, channel] /= OUTLIER  # which computes the same with it as without

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x.float() * self.gain if place == self.culprit else x)
            x = nn.functional.gelu(x)
        return self.head(x)  # type: ignore[no-any-return]


def left_out(seed: int) -> bool:
    """Return whether `tune` leaves the culprit out of fp8, and no other layer."""
    torch.set_num_threads(1)
    model = Planted(seed)
    with torch.no_grad():
        batches = [(x, model(x).argmax(1)) for x in torch.randn(4, 64, WIDTH)]
    loss = nn.functional.cross_entropy
    best = castwise.tune(model, batches, loss=loss, formats=("float8_tensorwise", "bfloat16"), tolerance=0.1)
    decisions = decide(best.policy, model)
    in_fp8 = {decision.name for decision in decisions if decision.recipe}
    return f"layers.{model.culprit}" not in in_fp8 and len(in_fp8) >= 3


def table(record: dict[str, Any]) -> str:
    lines = [
        headline(record["machine"]),
        "",
        f"| linear layers of the blocks | held-out loss, mean ± standard deviation of {record['seeds']} seeds | "
        "minus bf16 (95% interval) |",
        "|---|---|---|",
    ]
    for method, found in record["methods"].items():
        cells = [method, f"{found['mean']:.4f} ± {found['sd']:.4f}", "-"]
        if "minus bf16" in found:
            low, high = found["minus bf16"]["interval"]
            cells[2] = f"{found['minus bf16']['mean']:+.4f} ({low:+.4f} to {high:+.4f})"
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| a step of the demo's model, emulated, in times of one in bf16: median (quartiles) | "
        + " | ".join(
            f"{name}, bf16 takes {of_size['bf16, s']:.3f} s" for name, of_size in record["steps timed"].items()
        )
        + " |",
        "|---" * (1 + len(record["steps timed"])) + "|",
    ]
    for recipe in RECIPES:
        quartiles = [of_size["times bf16"][recipe] for of_size in record["steps timed"].values()]
        cells = [f"{median:.2f} ({low:.2f} - {high:.2f})" for low, median, high in quartiles]
        lines.append(f"| {' | '.join([recipe, *cells])} |")
    found = record["planted"]
    lines += ["", f"`tune` left the one layer out, and no other, in {found['left out']} of {found['models']} models."]
    return "\n".join(lines)


def main() -> None:
    start = time.perf_counter()
    about = {**recording.machine(), "scipy": scipy.__version__}
    record: dict[str, Any] = {"machine": about, "seeds": len(SEEDS), "steps": STEPS}
    record["steps timed"] = {name: cost(name, turns) for name, turns in STEPS_TIMED.items()}
    print(f"costs: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    # Spawned: a fork of a process that has used torch's threads may hang.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        record["methods"] = measure(pool, SEEDS)
        record["planted"] = {"models": MODELS, "left out": sum(pool.map(left_out, range(MODELS)))}
    record["took_s"] = round(time.perf_counter() - start, 1)
    recording.write("recipes-cpu", record, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
