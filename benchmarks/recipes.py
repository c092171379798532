"""Compare training with 8- and 4-bit recipes to training in bf16, and measure the cost of emulating the recipes.

    pip install scipy
    python -m benchmarks.recipes

Trains the demo's GPT from the same weights on the same batches, with five seeds each: in bf16, and with each recipe for
the linear layers of all blocks, or of all but the last block. Compares the final held-out loss. Then times a step of
the demo's model with each recipe against one in bf16, in turns. Finally runs `castwise.tune` on models in which one
layer is unsuitable for a recipe, because one channel of its input is far larger than the others. Writes
benchmarks/results/recipes-cpu.json and the tables in benchmarks/README.md. Takes about ten minutes on two quiet cores.
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
from benchmarks import recording
from benchmarks.fidelity import difference, spread
from benchmarks.recording import headline
from castwise._demo.corpus import Corpus, derive_seed, read_text
from castwise._demo.gpt import GPT, SIZES, Size
from castwise._demo.gpt import loss as loss_of_text
from castwise._recipes.recipe import RECIPES
from castwise.policy._module_rules import decide

SEEDS = range(5)
STEPS, WINDOW = 300, 25
VALIDATION_BATCHES = 16
# The width suits all recipes, whose largest blocks have 128 elements.
SIZE = Size(layers=2, heads=4, width=128, context=64, batch=8)
LEARNING_RATE = 1e-3
BF16 = "bf16"
LAST_IN_BF16 = ", last block in bf16"
METHODS = [BF16, *(f"{recipe}{how}" for recipe in RECIPES for how in ("", LAST_IN_BF16))]
TURNS = 15
WIDTH, CLASSES, OUTLIER, MODELS = 64, 16, 1e6, 100
STEPS_TIMED = {"tiny": TURNS, "small": 5}


class Outcome(NamedTuple):
    """The outcome of a training run: losses by step, and held-out loss."""

    losses: list[float]
    held_out: float


def policy_of(method: str, last: int) -> castwise.Policy:
    """Return the policy of a method, for a model whose last block has the number `last`."""
    recipe = method.removesuffix(LAST_IN_BF16)
    rules = {} if method == BF16 else {"blocks": recipe}
    if method.endswith(LAST_IN_BF16):
        rules[f"blocks.{last}"] = "bfloat16"
    return castwise.Policy(compute="bfloat16", modules=rules, backend="emulated")


def train(method: str, seed: int, steps: int = STEPS) -> Outcome:
    torch.set_num_threads(1)  # the model is too small for more threads
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
    """Train with all methods and all seeds."""
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
    """Return means over seeds and windows of 25 steps."""
    by_step = [statistics.fmean(of_seeds) for of_seeds in zip(*losses, strict=True)]
    return [round(statistics.fmean(by_step[begin : begin + WINDOW]), 5) for begin in range(0, len(by_step), WINDOW)]


def step_of(method: str, size: Size) -> Callable[[], float]:
    """Return a function that takes a training step and returns the seconds."""
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
    """Return median and quartiles of step times by recipe, relative to bf16 in the same round."""
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
    """An MLP of four linear layers, one of which has an outlier channel that costs the others their precision."""

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
            self.head.weight *= 1.5  # makes the loss depend on the layers' outputs
            self.layers[self.culprit].weight[:, channel] /= (
                OUTLIER  # so that the function is the same as without the outlier
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x.float() * self.gain if place == self.culprit else x)
            x = nn.functional.gelu(x)
        return self.head(x)  # type: ignore[no-any-return]


def left_out(seed: int) -> bool:
    """Return True if `tune` excludes exactly the culprit from fp8."""
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
        "| emulated step of the demo's model, relative to bf16: median (quartiles) | "
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
    lines += ["", f"`tune` excluded exactly the planted layer in {found['left out']} of {found['models']} models."]
    return "\n".join(lines)


def main() -> None:
    start = time.perf_counter()
    about = {**recording.machine(), "scipy": scipy.__version__}
    record: dict[str, Any] = {"machine": about, "seeds": len(SEEDS), "steps": STEPS}
    record["steps timed"] = {name: cost(name, turns) for name, turns in STEPS_TIMED.items()}
    print(f"costs: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    # Spawned, because a fork of a process that used torch's threads may hang.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        record["methods"] = measure(pool, SEEDS)
        record["planted"] = {"models": MODELS, "left out": sum(pool.map(left_out, range(MODELS)))}
    record["took_s"] = round(time.perf_counter() - start, 1)
    recording.write("recipes-cpu", record, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
