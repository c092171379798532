"""Compare tools that find planted faults: castwise.diagnose, torch's anomaly detection, and transformers' debugger.

    pip install transformers
    python -m benchmarks.fault_finding [--rounds 40]

Each round plants every fault at a random place in the training of a small mixture of experts. Writes
benchmarks/results/fault_finding-cpu.json and the table in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import statistics
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from tests.monitor import mixture
from tests.monitor.mixture import Mixture, loss_of
from torch import Tensor
from transformers.debug_utils import DebugUnderflowOverflow

import castwise
from benchmarks import recording
from benchmarks.pairing import ratio, seconds
from benchmarks.recording import headline
from castwise.diagnosis import diagnose

FP16 = torch.float16


class Step(NamedTuple):
    """A training step with a fault.

    Args:
        place: The faulty module, or "0" for the first input; None if no place is at fault.
    """

    model: Mixture
    x: Tensor
    scaler: Any
    place: str | None


class Verdict(NamedTuple):
    """A tool's verdict: whether there is a fault, and where."""

    found: bool
    text: str


def multiplied(model: Mixture, name: str, change: Callable[[Tensor], Tensor]) -> None:
    module = model.get_submodule(name)
    forward = module.forward
    module.forward = lambda x: change(forward(x))  # type: ignore[method-assign]


def forward_overflow(step: Step) -> Step:
    name = random.choice([name for name in mixture.linears(step.model) if ".experts." not in name])
    multiplied(step.model, name, lambda y: y * 1e30)
    return step._replace(place=name)


def expert_overflow(step: Step) -> Step:
    name = random.choice(used_experts(step))
    multiplied(step.model, name, lambda y: y * 1e30)
    return step._replace(place=name)


def masked_row(step: Step) -> Step:
    block = random.randrange(mixture.BLOCKS)
    step.model.blocks[block].attn.masked_row = random.randrange(mixture.TOKENS)  # type: ignore[union-attr, assignment]
    return step._replace(place=f"blocks.{block}.attn")


def backward_overflow(step: Step) -> Step:
    name = random.choice([name for name in mixture.linears(step.model) if ".experts." not in name])
    multiplied(step.model, name, mixture.with_multiplied_gradient)
    return step._replace(place=name)


def high_scale(step: Step) -> Step:
    return step._replace(scaler=castwise.GradScaler("cpu", init_scale=2.0 ** random.randint(30, 100)))


def bad_data(step: Step) -> Step:
    step.x.view(-1)[random.randrange(step.x.numel())] = torch.nan
    return step._replace(place="0")


def bad_weight(step: Step) -> Step:
    used = [name for name in mixture.linears(step.model) if ".experts." not in name] + used_experts(step)
    name = random.choice(used)
    weight = step.model.get_submodule(name).weight
    with torch.no_grad():
        weight.view(-1)[random.randrange(weight.numel())] = torch.inf  # type: ignore[operator, union-attr]
    return step._replace(place=name)


def used_experts(step: Step) -> list[str]:
    with torch.no_grad(), castwise.autocast("cpu", dtype=FP16):
        step.model(step.x)
    return [
        f"blocks.{block}.moe.experts.{expert}.{layer}"
        for block in range(mixture.BLOCKS)
        for expert in range(mixture.EXPERTS)
        if step.model.blocks[block].moe.tokens_of[expert]  # type: ignore[union-attr, index]
        for layer in ("0", "2")
    ]


FAULTS: dict[str, Callable[[Step], Step]] = {
    "overflow in the forward": forward_overflow,
    "overflow in one expert": expert_overflow,
    "attention: a row masked altogether": masked_row,
    "overflow in the backward": backward_overflow,
    "scale too high": high_scale,
    "NaN in the data": bad_data,
    "inf in a weight": bad_weight,
    "none": lambda step: step,
}


def plain(step: Step) -> Verdict:
    mixture.backward(step.model, step.x, FP16, step.scaler)
    return Verdict(False, "")


def by_castwise(step: Step) -> Verdict:
    with castwise.autocast("cpu", dtype=FP16):
        found = diagnose(step.model, loss_of, step.x, step.scaler)
    return Verdict(found.found, found.module or found.argument)


def by_anomaly_detection(step: Step) -> Verdict:
    with warnings.catch_warnings(record=True) as said, torch.autograd.set_detect_anomaly(True):
        try:
            plain(step)
        except RuntimeError as error:
            return Verdict(True, "\n".join([str(error), *(str(warning.message) for warning in said)]))
    return Verdict(False, "")


def by_transformers(step: Step) -> Verdict:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        DebugUnderflowOverflow(step.model)
        try:
            plain(step)
        except ValueError:
            headers = [line.split()[0] for line in printed.getvalue().splitlines() if line.startswith(" " * 18)]
            return Verdict(True, headers[-1])
    return Verdict(False, "")


TOOLS = {
    "castwise.diagnose": by_castwise,
    "set_detect_anomaly": by_anomaly_detection,
    "DebugUnderflowOverflow": by_transformers,
}


def names(verdict: Verdict, place: str) -> bool:
    """Return True if a tool names a place or something inside it, or for bad data the module that receives it."""
    said = verdict.text
    return said == place or said.startswith(f"{place}.") or (place == "0" and said == "embed")


def planted(fault: str, seed: int) -> Step:
    random.seed(seed)
    model, scaler = mixture.trained(seed, random.randrange(4), FP16)
    model.zero_grad()
    return FAULTS[fault](Step(model, next(mixture.batches()), scaler, None))


def measure(rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for call in TOOLS.values():  # load everything that a first call loads
        call(planted("overflow in the forward", 0))
    for fault in FAULTS:
        times: dict[str, list[float]] = {tool: [] for tool in ("plain", *TOOLS)}
        counts = {tool: {"found": 0, "named": 0} for tool in TOOLS}
        has_place = False
        for seed in range(rounds):
            for tool in random.sample(list(times), len(times)):
                step = planted(fault, seed)
                verdicts: list[Verdict] = []
                call = {"plain": plain, **TOOLS}[tool]
                times[tool].append(seconds(lambda: verdicts.append(call(step)), "cpu"))  # noqa: B023
                if tool in counts:
                    counts[tool]["found"] += verdicts[0].found
                    has_place = step.place is not None
                    counts[tool]["named"] += has_place and verdicts[0].found and names(verdicts[0], str(step.place))
        results[fault] = {"plain": {"median_ms": statistics.median(times["plain"]) * 1e3}}
        for tool, count in counts.items():
            results[fault][tool] = {
                "found": count["found"],
                "named": count["named"] if has_place else None,
                "median_ms": statistics.median(times[tool]) * 1e3,
                "ratio": ratio(times[tool], times["plain"]),
            }
    return results


def table(record: dict[str, Any]) -> str:
    lines = [
        headline(record["machine"]),
        "",
        f"| planted, {record['rounds']} of each | " + " | ".join(TOOLS) + " |",
        "|---" * (1 + len(TOOLS)) + "|",
    ]
    for fault, row in record["results"].items():
        cells = [
            f"{row[tool]['found']} found, "
            + ("" if row[tool]["named"] is None else f"{row[tool]['named']} named, ")
            + f"{row[tool]['ratio']['median']:.1f}"
            for tool in TOOLS
        ]
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for more threads
    record = {
        "machine": {**recording.machine(), "transformers": transformers.__version__},
        "rounds": arguments.rounds,
        "results": measure(arguments.rounds),
    }
    recording.write("fault_finding-cpu", record, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
