"""What a policy costs: a stack of small layers under torch.autocast, with nested regions by hand, and under policies.

    python benchmarks/policy_overhead.py [--device cpu] [--rounds 60]

Writes benchmarks/results/policy_overhead-<device>.json and the table in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import castwise
import recording

LAYERS = 50
BF16 = torch.bfloat16


class Nothing(TorchFunctionMode):
    """What any mode costs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class ByHand(nn.Module):
    """A layer in fp32, as one writes it without policies."""

    def __init__(self, layer: nn.Module, device: str) -> None:
        super().__init__()
        self.layer, self.device = layer, device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, enabled=False):
            return self.layer(x.float())  # type: ignore[no-any-return]


def stack(device: str, by_hand: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8).requires_grad_(False) for _ in range(LAYERS)]
    return nn.Sequential(*(ByHand(layer, device) if by_hand else layer for layer in layers)).to(device)


def cases(device: str) -> dict[str, Callable[[], Any]]:
    """Return what is timed; the first one is what the others are compared with."""
    x = torch.randn(4, 8, device=device)
    plain, by_hand, named, typed = stack(device), stack(device, by_hand=True), stack(device), stack(device)
    policies = {
        "without rules": (stack(device), castwise.Policy(compute="bfloat16")),
        "every layer in fp32": (named, castwise.Policy(compute="bfloat16", modules={nn.Linear: "float32"})),
        "with a rule for an op that does not occur": (
            typed,
            castwise.Policy(compute="bfloat16", ops={"softmax": "float32"}),
        ),
    }

    def torch_autocast() -> Any:
        with torch.autocast(device, dtype=BF16):
            return plain(x)

    def regions_by_hand() -> Any:
        with torch.autocast(device, dtype=BF16):
            return by_hand(x)

    def bare_mode() -> Any:
        with Nothing(), torch.autocast(device, dtype=BF16):
            return plain(x)

    def under(model: nn.Module, policy: castwise.Policy) -> Callable[[], Any]:
        bound = policy.bind(model)

        def run() -> Any:
            with castwise.autocast(device, policy=bound):
                return model(x)

        return run

    return {
        "torch.autocast": torch_autocast,
        "torch.autocast, every layer in fp32 by a region of its own": regions_by_hand,
        "torch.autocast under a TorchFunctionMode that does nothing": bare_mode,
        **{f"policy, {name}": under(*of_policy) for name, of_policy in policies.items()},
    }


def measure(device: str, rounds: int) -> dict[str, Any]:
    calls = cases(device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 3):
        for name in random.sample(list(calls), len(calls)):
            taken = recording.seconds(calls[name], device, 20)
            if index >= 3:
                times[name].append(taken)
    base = times["torch.autocast"]
    return {
        name: {
            "median_us": statistics.median(values) * 1e6,
            "ratio": recording.ratio(values, base),
            "us_per_layer": statistics.median(a - b for a, b in zip(values, base, strict=True)) * 1e6 / LAYERS,
        }
        for name, values in times.items()
    }


def table(record: dict[str, Any]) -> str:
    lines = [
        recording.title(record["machine"]),
        "",
        "| | forward | / torch.autocast (quartiles) | more for each layer |",
        "|---|---|---|---|",
    ]
    for name, row in record["results"].items():
        low, high = row["ratio"]["quartiles"]
        lines.append(
            f"| {name} | {row['median_us']:,.0f} us | {row['ratio']['median']:.3f} ({low:.3f} - {high:.3f}) "
            f"| {row['us_per_layer']:.2f} us |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    record = {
        "machine": recording.machine(arguments.device),
        "results": measure(arguments.device, arguments.rounds),
    }
    recording.write(f"policy_overhead-{arguments.device}", record, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
