"""Compare how well models learn with castwise's mixed precision and in fp32.

    pip install scikit-learn
    python -m benchmarks.fidelity

Trains each task with five seeds, from the same weights on the same batches: in fp32, and in bf16 and fp16 with castwise
and with torch.amp, whose losses must be bit-identical. Compares the final held-out loss, computed in fp32 from the
learned weights. Writes benchmarks/results/fidelity-cpu.json and the table in benchmarks/README.md. Takes about ten
minutes.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import scipy
import sklearn
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from scipy import stats
from sklearn import datasets
from torch import Tensor, nn

import castwise
from benchmarks import recording
from benchmarks.recording import headline
from castwise._demo.corpus import Corpus, derive_seed, read_text
from castwise._demo.gpt import EMULATED, GPT, Size
from castwise._demo.gpt import loss as loss_of_text

SEEDS = range(5)
CONFIDENCE = 0.95
MAX_NORM = 1.0
BATCH = 64
VALIDATION_BATCHES = 8
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LIBRARIES: dict[str, Any] = {
    "torch": (torch.amp.autocast, torch.amp.GradScaler),
    "castwise": (castwise.autocast, castwise.GradScaler),
}
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Data:
    """The data of one seed: a batch for each step, and held-out batches."""

    batch: Callable[[int], Pair]
    held_out: list[Pair]


@dataclass(frozen=True)
class Task:
    """A training task; CPUs emulate fp16, so it is feasible only for small models."""

    name: str
    steps: int
    learning_rate: float
    precisions: tuple[str, ...]
    model: Callable[[], nn.Module]
    data: Callable[[int], Data]
    loss: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training run: losses by step, held-out loss before and after, skipped steps, weights."""

    losses: list[float]
    before: float
    after: float
    skipped: int
    weights: str


def text_for(size: Size) -> Callable[[int], Data]:
    def data(seed: int) -> Data:
        corpus = Corpus(read_text(None), size.context)
        return Data(lambda step: corpus.batch(size, seed, step), list(corpus.validation(size, VALIDATION_BATCHES)))

    return data


def rows_of(load: Callable[[], Any], prepare: Callable[[Any], Pair]) -> Callable[[int], Data]:
    """Split a table into training rows and held-out rows, one in five, by a seed."""

    def data(seed: int) -> Data:
        x, y = prepare(load())
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(derive_seed(seed, "split")))
        kept, held_out = order[len(x) // 5 :], order[: len(x) // 5]

        def batch(step: int) -> Pair:
            generator = torch.Generator().manual_seed(derive_seed(seed, f"step {step}"))
            chosen = kept[torch.randint(len(kept), (BATCH,), generator=generator)]
            return x[chosen], y[chosen]

        return Data(batch, [(x[held_out], y[held_out])])

    return data


def digits(table: Any) -> Pair:
    return torch.tensor(table.images, dtype=torch.float32)[:, None] / 16, torch.tensor(table.target)


def diabetes(table: Any) -> Pair:
    x, y = torch.tensor(table.data, dtype=torch.float32), torch.tensor(table.target, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std())[:, None]


def classifier() -> nn.Module:
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10))


def regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


WIDER = Size(layers=2, heads=2, width=64, context=64, batch=8)
BOTH = ("bf16", "fp16")
TASKS = [
    Task("GPT, 2 layers of width 64", 800, 1e-3, ("bf16",), lambda: GPT(WIDER), text_for(WIDER), loss_of_text),
    Task("GPT, 1 layer of width 32", 600, 2e-3, BOTH, lambda: GPT(EMULATED), text_for(EMULATED), loss_of_text),
    Task("digits, convolutions", 300, 2e-3, BOTH, classifier, rows_of(datasets.load_digits, digits), F.cross_entropy),
    Task("diabetes, MLP", 300, 1e-3, BOTH, regressor, rows_of(datasets.load_diabetes, diabetes), squared_error),
]


def digest(model: nn.Module) -> str:
    """Return the SHA-256 of all weights, which all training runs have in the same order and shapes."""
    sha256 = hashlib.sha256()
    for weight in model.state_dict().values():
        sha256.update(weight.numpy().tobytes())
    return sha256.hexdigest()


def train(task: Task, seed: int, precision: str, library: str) -> Outcome:
    """Train with the usual loop; in fp32, region and scaler are disabled."""
    autocast, make_scaler = LIBRARIES[library]
    data = task.data(seed)
    torch.manual_seed(derive_seed(seed, "weights"))
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, fused=True)
    scaler = make_scaler("cpu", enabled=precision == "fp16")
    before, losses, skipped = held_out_loss(task, model, data), [], 0
    for step in range(task.steps):
        x, y = data.batch(step)
        optimizer.zero_grad()
        with autocast("cpu", dtype=DTYPES.get(precision), enabled=precision in DTYPES):
            loss = task.loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        losses.append(loss.item())
    return Outcome(losses, before, held_out_loss(task, model, data), skipped, digest(model))


@torch.no_grad()
def held_out_loss(task: Task, model: nn.Module, data: Data) -> float:
    return statistics.fmean(task.loss(model(x), y).item() for x, y in data.held_out)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean and the standard deviation over seeds."""
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values), "values": list(values)}


def difference(low: Sequence[float], fp32: Sequence[float]) -> dict[str, Any]:
    """Return the mean of paired differences, with its confidence interval from Student's t."""
    differences = [a - b for a, b in zip(low, fp32, strict=True)]
    mean, n = statistics.fmean(differences), len(differences)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * statistics.stdev(differences) / n**0.5
    return {"mean": mean, "interval": [mean - half, mean + half]}


def measure(task: Task, seeds: Sequence[int]) -> dict[str, Any]:
    """Train in all precisions with all seeds."""
    fp32 = [train(task, seed, "fp32", "torch") for seed in seeds]
    result: dict[str, Any] = {
        "steps": task.steps,
        "untrained": spread([outcome.before for outcome in fp32]),
        "fp32": spread([outcome.after for outcome in fp32]),
    }
    for precision in task.precisions:
        ours, theirs = ([train(task, seed, precision, library) for seed in seeds] for library in ("castwise", "torch"))
        result[precision] = {
            **spread([outcome.after for outcome in ours]),
            "minus fp32": difference([outcome.after for outcome in ours], [outcome.after for outcome in fp32]),
            "skipped steps": [outcome.skipped for outcome in ours],
            # Outcomes contain every loss and a digest of the weights.
            "seeds identical to torch.amp": sum(a == b for a, b in zip(ours, theirs, strict=True)),
        }
    return result


def table(record: dict[str, Any]) -> str:
    lines = [
        headline(record["machine"]),
        "",
        f"| held-out loss, mean ± standard deviation of {record['seeds']} seeds | steps | untrained | fp32 | "
        "castwise | minus fp32 (95% interval) | seeds identical to torch.amp |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in record["tasks"].items():
        known = [f"{result[key]['mean']:.4f} ± {result[key]['sd']:.4f}" for key in ("untrained", "fp32")]
        for precision in (precision for precision in DTYPES if precision in result):
            row = result[precision]
            low, high = row["minus fp32"]["interval"]
            cells = [f"{name}, {precision}", str(result["steps"]), *known, f"{row['mean']:.4f} ± {row['sd']:.4f}"]
            cells += [f"{row['minus fp32']['mean']:+.5f} ({low:+.5f} to {high:+.5f})"]
            cells += [f"{row['seeds identical to torch.amp']} of {record['seeds']}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)  # the models are too small for more threads
    warnings.filterwarnings("ignore", ".*its ops are emulated")
    start = time.perf_counter()
    about = {**recording.machine(), "scikit-learn": sklearn.__version__, "scipy": scipy.__version__}
    record: dict[str, Any] = {"machine": about, "seeds": len(SEEDS), "tasks": {}}
    for task in TASKS:
        record["tasks"][task.name] = measure(task, SEEDS)
        print(f"{task.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    record["took_s"] = round(time.perf_counter() - start, 1)
    recording.write("fidelity-cpu", record, table(record))
    print(table(record))


if __name__ == "__main__":
    main()
