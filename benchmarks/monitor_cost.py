"""What a monitor costs: steps of the demo alone, under a monitor that does not sample them, and under one that does.

    python benchmarks/monitor_cost.py [--device cpu] [--preset tiny] [--rounds 40]

Writes benchmarks/results/monitor_cost-<device>.json and the table in benchmarks/README.md. Records go to a file; losses
are checked to be the same bit for bit.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import recording
from castwise.cli.demo.corpus import Corpus, read_text
from castwise.cli.demo.gpt import EMULATED, SIZES
from castwise.cli.demo.ranks import Ranks
from castwise.cli.demo.settings import CASTWISE, Training
from castwise.cli.demo.training import Step, Trainer
from castwise.monitor.monitor import Monitor

EVERY = 100  # the monitor's default
WARM_UP = 5


def measure(training: Training, corpus: Corpus, device: torch.device, rounds: int) -> dict[str, Any]:
    """Let three trainers take the same steps, in random order; the first sample of the second is in the warm-up."""
    with tempfile.TemporaryDirectory() as folder, Ranks(None, device) as ranks:
        trainers = {name: Trainer(training, corpus, device, 0, ranks) for name in ("alone", "not sampled", "sampled")}
        monitors = [
            Monitor(
                trainers[name]._model,
                trainers[name]._optimizer,
                trainers[name]._scaler,
                every=every,
                sinks=[Path(folder, name)],
            )
            for name, every in (("not sampled", 10**9), ("sampled", 1))
        ]
        for monitor in monitors:
            monitor.attach()
        times: dict[str, list[float]] = {name: [] for name in trainers}
        for number in range(WARM_UP + rounds):
            steps: list[Step] = []
            for name in random.sample(list(trainers), len(trainers)):
                trainer = trainers[name]
                seconds = recording.seconds(
                    lambda trainer=trainer, steps=steps: steps.append(trainer.step()), device.type
                )
                if number >= WARM_UP:
                    times[name].append(seconds)
            if len({step.loss for step in steps}) > 1:
                raise AssertionError(f"{training.precision}, step {number}: the losses differ: {steps}")
        for monitor in monitors:
            monitor.detach()
        bytes_of_sample = max(len(line) for line in Path(folder, "sampled", "monitor.jsonl").read_bytes().splitlines())
    medians = {name: statistics.median(of_name) for name, of_name in times.items()}
    between = recording.ratio(times["not sampled"], times["alone"])
    sampled = recording.ratio(times["sampled"], times["alone"])
    return {
        "seconds": medians,
        "not sampled / alone": between,
        "sampled / alone": sampled,
        # The sample's share is what it takes over the step that it is, spread over all steps up to the next.
        "more at the default": (sampled["median"] - 1) / EVERY,
        "bytes of a sample": bytes_of_sample,
    }


def table(record: dict[str, Any]) -> str:
    lines = [
        recording.title(record["machine"]),
        "",
        "| | step alone | not sampled / alone (quartiles) | sampled / alone (quartiles) "
        f"| samples, one in {EVERY} steps | bytes of a sample |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in record["cases"].items():
        between, sampled = row["not sampled / alone"], row["sampled / alone"]
        lines.append(
            f"| {name} | {row['seconds']['alone'] * 1e3:.1f} ms "
            f"| {between['median']:.4f} ({between['quartiles'][0]:.4f} - {between['quartiles'][1]:.4f}) "
            f"| {sampled['median']:.2f} ({sampled['quartiles'][0]:.2f} - {sampled['quartiles'][1]:.2f}) "
            f"| +{row['more at the default']:.2%} | {row['bytes of a sample']:,} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", default="tiny", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    random.seed(0)
    device, text = torch.device(options.device), read_text(None)
    # The demo's own sizes: for fp16 a CPU has no units.
    sizes = dict.fromkeys(("fp32", "bf16", "fp16"), SIZES[options.preset])
    if options.device == "cpu":
        sizes["fp16"] = EMULATED
    cases = {
        f"{precision}, {size.layers} layers of width {size.width}": measure(
            Training(precision, CASTWISE, size, 0), Corpus(text, size.context), device, options.rounds
        )
        for precision, size in sizes.items()
    }
    record = {"machine": recording.machine(options.device), "cases": cases}
    print(table(record))
    recording.write(f"monitor_cost-{options.device}", record, table(record))


if __name__ == "__main__":
    main()
