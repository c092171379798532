"""The cost of a policy: small layers under torch.autocast, with nested regions by hand, and under policies."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import castwise
from benchmarks.benchmark import Benchmark, Record, Table, shown
from benchmarks.pairing import AGAIN, QUICK_S, Rounds, compare, race, ratio, seconds

LAYERS, REPETITIONS = 50, 20
BF16 = torch.bfloat16
BASE = "torch.autocast"
# Policies, each with the equivalent in torch.
RIVALS = {
    "policy, without rules": BASE,
    "policy, every layer in fp32": "torch.autocast, every layer in fp32 by a region of its own",
}


@dataclass(frozen=True)
class Plan:
    """Number of rounds."""

    rounds: Rounds


class Nothing(TorchFunctionMode):
    """A mode that does nothing, to measure the cost of any mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        return func(*args, **(kwargs or {}))


class ByHand(nn.Module):
    """A layer kept in fp32 by hand, without policies."""

    def __init__(self, layer: nn.Module, device: str) -> None:
        super().__init__()
        self.layer, self.device = layer, device

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer in fp32, with autocast disabled."""
        with torch.autocast(self.device, enabled=False):
            result: Tensor = self.layer(x.float())
        return result


def stack(device: str, by_hand: bool = False) -> nn.Sequential:
    """Return layers so small that calling them is most of their cost."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8).requires_grad_(False) for _ in range(LAYERS)]
    return nn.Sequential(*(ByHand(layer, device) if by_hand else layer for layer in layers)).to(device)


def cases(device: str) -> dict[str, Callable[[], object]]:
    """Return the timed calls by name."""
    x = torch.randn(4, 8, device=device)
    plain, by_hand = stack(device), stack(device, by_hand=True)

    def under_torch(model: nn.Module) -> Callable[[], object]:
        def run() -> None:
            with torch.autocast(device, dtype=BF16):
                model(x)

        return run

    def under_a_mode() -> None:
        with Nothing():
            under_torch(plain)()

    def under(policy: castwise.Policy) -> Callable[[], object]:
        model = stack(device)
        bound = policy.bind(model)

        def run() -> None:
            with castwise.autocast(device, policy=bound):
                model(x)

        return run

    return {
        BASE: under_torch(plain),
        AGAIN: under_torch(plain),
        "torch.autocast, every layer in fp32 by a region of its own": under_torch(by_hand),
        "torch.autocast under a TorchFunctionMode that does nothing": under_a_mode,
        "policy, without rules": under(castwise.Policy(compute="bfloat16")),
        "policy, every layer in fp32": under(castwise.Policy(compute="bfloat16", modules={nn.Linear: "float32"})),
        "policy, with a rule for an op that does not occur": under(
            castwise.Policy(compute="bfloat16", ops={"softmax": "float32"})
        ),
    }


def measure(device: str, plan: Plan) -> Record:
    """Time all cases in turns."""

    def timed(call: Callable[[], object]) -> Callable[[], float]:
        return lambda: seconds(call, device, REPETITIONS)

    times = race({name: timed(call) for name, call in cases(device).items()}, plan.rounds, warm_up=3)
    base, again = times[BASE], times.pop(AGAIN)
    results: Record = {
        name: {
            "median_us": statistics.median(values) * 1e6,
            "ratio": ratio(values, base),
            "us_per_layer": statistics.median(a - b for a, b in zip(values, base, strict=True)) * 1e6 / LAYERS,
        }
        for name, values in times.items()
    }
    for name, rival in RIVALS.items():
        results[name]["to_torch"] = compare(times[name], times[rival], ratio(again, base))
    return {"results": results}


def tables(record: Record) -> list[Table]:
    """Return a table with one row per case."""
    table = Table(["", "forward", "/ torch.autocast (quartiles)", "extra per layer", "/ the same in torch", "verdict"])
    for name, row in record["results"].items():
        to_torch = row.get("to_torch")
        table.rows.append(
            [name, f"{row['median_us']:,.0f} us", shown(row["ratio"]), f"{row['us_per_layer']:.2f} us"]
            + ([shown(to_torch), to_torch["verdict"]] if to_torch else ["-", "-"])
        )
    return [table]


BENCHMARK = Benchmark(
    name="policy_overhead",
    title="A policy's cost",
    about=f"{LAYERS} linear layers of 8 x 8 without gradients: the cost of a forward is mostly that of the calls.",
    quick=Plan(rounds=Rounds(15, QUICK_S)),
    full=Plan(rounds=Rounds(60)),
    measure=measure,
    tables=tables,
)
