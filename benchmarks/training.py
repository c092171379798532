"""Training speed of the demo's GPT: tokens per second with castwise, with torch.amp, and in fp32."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace

import torch

from benchmarks.benchmark import Benchmark, Record, Table, left_out, shown
from benchmarks.pairing import AGAIN, CASTWISE, QUICK_S, TORCH, Rounds, compare, race, ratio
from castwise._demo import training as demo
from castwise._demo.corpus import Corpus, read_text
from castwise._demo.gpt import SIZES, Size
from castwise._demo.training import Trainer, Training
from castwise.amp._emulation import is_native_here

FP32 = "fp32"
WIDE = Size(layers=2, heads=8, width=768, context=128, batch=2)  # 14 million parameters
LARGE = Size(layers=8, heads=16, width=1024, context=128, batch=1)  # 100 million
LIBRARIES = {TORCH: demo.TORCH, AGAIN: demo.TORCH, CASTWISE: demo.CASTWISE}


@dataclass(frozen=True)
class Plan:
    """Rounds and model sizes."""

    rounds: Rounds
    sizes: dict[str, Size] = field(default_factory=lambda: {"tiny": SIZES["tiny"]})


def why_not(precision: str, device: str) -> str | None:
    """Return the reason why a precision is not measured, or None if it is."""
    if precision != "fp16" or device != "cpu" or is_native_here(torch.float16):
        return None
    return "left out: this CPU has no units for fp16, or torch does not use them"


def race_of(size: Size, precision: str, corpus: Corpus, device: str, rounds: Rounds) -> Record:
    """Time steps of training runs of the same model on the same batches in turns."""
    where = torch.device(device)
    rivals = {FP32: Training(FP32, demo.TORCH, size, 0)}
    rivals |= {name: Training(precision, library, size, 0) for name, library in LIBRARIES.items()}
    trainers = {name: Trainer(training, corpus, where) for name, training in rivals.items()}
    times = race({name: trainer.step for name, trainer in trainers.items()}, rounds, warm_up=3)
    return {
        "tokens_per_s": {name: size.tokens / statistics.median(values) for name, values in times.items()},
        "castwise / torch": compare(times[CASTWISE], times[TORCH], ratio(times[AGAIN], times[TORCH])),
        "castwise / fp32": compare(times[CASTWISE], times[FP32], ratio(times[AGAIN], times[TORCH])),
        "same losses as torch": trainers[CASTWISE].losses == trainers[TORCH].losses,
    }


def measure(device: str, plan: Plan) -> Record:
    """Measure each size in bf16, and in fp16 if the device supports it."""
    rows: Record = {}
    text = read_text(None)
    for name, size in plan.sizes.items():
        corpus = Corpus(text, size.context)
        for precision in ("bf16", "fp16"):
            reason = why_not(precision, device)
            rows[f"{name}, {precision}"] = {
                "layers": size.layers,
                "width": size.width,
                "tokens of a step": size.tokens,
                **({"skipped": reason} if reason else race_of(size, precision, corpus, device, plan.rounds)),
            }
    return {"rows": rows}


def tables(record: Record) -> list[Table]:
    """Return a table with one row per size and precision."""
    table = Table(
        [
            *("", "fp32, tokens/s", "torch.amp, tokens/s", "castwise, tokens/s"),
            *("step: castwise / torch.amp (quartiles)", "verdict", "step: castwise / fp32 (quartiles)", "verdict"),
            "same losses as torch.amp",
        ]
    )
    rows = {f"{name}: {row['layers']} layers of width {row['width']}": row for name, row in record["rows"].items()}
    for label, row in rows.items():
        if "skipped" in row:
            continue
        cells = [f"{row['tokens_per_s'][rival]:,.0f}" for rival in (FP32, TORCH, CASTWISE)]
        for rival in ("torch", "fp32"):
            found = row[f"castwise / {rival}"]
            cells += [shown(found), found["verdict"]]
        table.rows.append([label, *cells, "yes" if row["same losses as torch"] else "NO"])
    return [replace(table, below=left_out(rows))]


BENCHMARK = Benchmark(
    name="training",
    title="Training from end to end",
    about="The demo's GPT on the text of the standard library: complete steps with clipping, on preloaded batches.",
    quick=Plan(rounds=Rounds(9, QUICK_S)),
    full=Plan(rounds=Rounds(40, 240.0), sizes={"tiny": SIZES["tiny"], "wide": WIDE, "large": LARGE}),
    measure=measure,
    tables=tables,
)
