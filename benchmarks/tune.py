"""Compare training runs with a tuned policy, uniform bf16, `bf16_stable`, an fp32 head, and a random policy.

    python -m benchmarks.tune [--seeds 5] [--steps 400]

Trains the demo's GPT in fp32 for some steps, tunes a policy, and continues training in fp32 and under each policy, on
the same batches. The random policy has as many flops as the tuned one. `tune` makes no promise about long runs; this
benchmark records a few. Writes benchmarks/results/tune-cpu.json and the table in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import warnings
from typing import Any

import torch
from torch import Tensor

import castwise
from benchmarks import recording
from benchmarks.recording import headline
from castwise import Policy
from castwise._demo import gpt
from castwise._demo.corpus import Corpus, read_text
from castwise.comparison._watched_calls import Watch
from castwise.tuning._costs import OwnFlops

NAME = "tune-cpu"
SIZE = gpt.Size(layers=2, heads=2, width=64, context=64, batch=8)
WARM_UP, TUNED_ON, VALIDATED_ON = 200, 8, 16
# Tolerance of the loss, smaller than the error of uniform bf16, so that there is a choice to make.
OF_UNIFORM = 0.5
FP32 = Policy(compute="float32")
FIXED = {
    "bf16": castwise.policies.bf16,
    "bf16_stable": castwise.policies.bf16_stable,
    "fp32 head": Policy(compute="bfloat16", modules={"head": "float32"}),
}


def train(model: gpt.GPT, policy: Policy, corpus: Corpus, seed: int, steps: range) -> list[float]:
    """Train a model in place; return its losses."""
    bound, losses = policy.bind(model), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in steps:
        inputs, targets = corpus.batch(SIZE, seed, step)
        with castwise.autocast("cpu", policy=bound):
            loss = gpt.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    bound.unbind()
    return losses


@torch.no_grad()
def validated(model: gpt.GPT, corpus: Corpus) -> float:
    """Return the held-out loss in fp32."""
    return statistics.fmean(gpt.loss(model(x), y).item() for x, y in corpus.validation(SIZE, VALIDATED_ON))


def by_chance(flops: dict[str, int], cost: float, seed: int) -> Policy:
    """Return a policy that keeps randomly drawn modules in fp32, with about the given cost in flops."""
    names, chosen = list(flops), []
    random.Random(seed).shuffle(names)
    spent = 0.5
    for name in names:
        more = 0.5 * flops[name] / sum(flops.values())
        if spent + more <= cost + 1e-9:
            chosen.append(name)
            spent += more
    return Policy(compute="bfloat16", modules=dict.fromkeys(chosen, "float32"))


def of_seed(seed: int, steps: int) -> dict[str, Any]:
    """Return, by policy, the mean relative loss error before training continues, and losses and held-out loss after."""
    corpus = Corpus(read_text(None), SIZE.context)
    torch.manual_seed(seed)
    start = gpt.GPT(SIZE)
    train(start, FP32, corpus, seed, range(WARM_UP))
    batches: list[tuple[Tensor, Tensor]] = [corpus.batch(SIZE, seed + 1000, step) for step in range(TUNED_ON)]
    counted = OwnFlops()
    with Watch(start) as watch, counted.counting, watch.handling(counted.call):
        start(batches[0][0])
    flops = {tap.name: count for tap, count in counted.counts.items() if count}
    uniform = castwise.compare(start, batches, FIXED, loss=gpt.loss, gradients=False)
    tolerance = OF_UNIFORM * uniform["bf16"].summary.relative_loss_error
    best = castwise.tune(start, batches, loss=gpt.loss, formats=("bfloat16", "float32"), tolerance=tolerance)
    policies = {"fp32": FP32, "tuned": best.policy, **FIXED, "by chance": by_chance(flops, best.cost, seed)}
    errors = castwise.compare(start, batches, policies, loss=gpt.loss, gradients=False)
    found: dict[str, Any] = {"is_within_tolerance": best.is_within_tolerance, "tuned cost": best.cost, "policies": {}}
    for name, policy in policies.items():
        model = copy.deepcopy(start)
        losses = train(model, policy, corpus, seed, range(WARM_UP, WARM_UP + steps))
        found["policies"][name] = {
            "step error": errors[name].summary.relative_loss_error,
            "losses": losses[-50:],
            "held-out loss": validated(model, corpus),
        }
    return found


def table(record: dict[str, Any]) -> str:
    """Return a table with a row for each policy."""
    seeds = record["seeds"]
    rows = []
    for name in seeds[0]["policies"]:
        of = [seed["policies"][name] for seed in seeds]
        apart = [
            statistics.fmean(abs(a - b) for a, b in zip(own["losses"], seed["policies"]["fp32"]["losses"], strict=True))
            for own, seed in zip(of, seeds, strict=True)
        ]
        held_out = [
            own["held-out loss"] - seed["policies"]["fp32"]["held-out loss"]
            for own, seed in zip(of, seeds, strict=True)
        ]
        spread = statistics.stdev(held_out) if len(held_out) > 1 else 0.0
        rows.append(
            f"| {name} | {statistics.fmean(each['step error'] for each in of):.1e} | {statistics.fmean(apart):.4f} "
            f"| {statistics.fmean(held_out):+.5f} ± {spread:.5f} |"
        )
    costs = statistics.fmean(seed["tuned cost"] for seed in seeds)
    return "\n".join(
        [
            headline(record["machine"]),
            "",
            "| policy | relative loss error, before | mean \\|loss - fp32's\\|, last 50 steps "
            "| held-out loss minus fp32's, after |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Means of {len(seeds)} seeds, {record['steps']} steps after {WARM_UP} in fp32. The tuned policy has "
            f"{costs:.2f} of the flops of fp32, like the one by chance; uniform bf16 has 0.50.",
        ]
    )


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # about emulated bf16
    seeds = [of_seed(seed, options.steps) for seed in range(options.seeds)]
    record = {"machine": recording.machine(), "steps": options.steps, "seeds": seeds}
    recording.write(NAME, record, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
