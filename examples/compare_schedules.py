"""Compare scale schedules on recorded runs: how many steps each would have skipped, and what it flushes to zero.

    python examples/compare_schedules.py [TRACE ...]
    python examples/compare_schedules.py --record    # train the demo's model and rewrite the traces
    python examples/compare_schedules.py --write     # write benchmarks/results/schedules.json and the manual's table

The traces are 600 steps of the smallest GPT of `castwise demo`: unmodified, with a learning rate at which gradients
spike, and with occasional batches whose loss is not finite. They were recorded in fp32, so no gradient was lost before
it was measured. They contain gradients of weights only; those of activations may overflow earlier.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import castwise
from castwise import schedules
from castwise._demo import gpt
from castwise._demo.corpus import Corpus, read_text
from castwise.monitor import Run

TRACES = Path(__file__).parent / "traces"
STEPS = 600
# By name: the learning rate, and the interval between bad batches (0: none).
TRAININGS = {"steady": (5e-4, 0), "spiking": (2e-2, 0), "bad_batches": (5e-4, 97)}

SCHEDULES = {
    "Dynamic()": schedules.Dynamic(),
    "Dynamic(growth_interval=100)": schedules.Dynamic(growth_interval=100),
    'Dynamic(growth_interval=100, on_nonfinite_loss="hold")': schedules.Dynamic(
        growth_interval=100, on_nonfinite_loss="hold"
    ),
    "Dynamic(2.0**32, growth_interval=1000, hysteresis=2, min_scale=1.0)": schedules.Dynamic(
        2.0**32, growth_interval=1000, hysteresis=2, min_scale=1.0
    ),
    "Headroom()": schedules.Headroom(),
    "Headroom(headroom_bits=1.0)": schedules.Headroom(headroom_bits=1.0),
    "Static(2.0**10)": schedules.Static(2.0**10),
    "Guard()": schedules.Guard(),
}
ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "schedules.json"
PAGE = ROOT / "docs" / "reference" / "schedules.md"


def record(name: str) -> None:
    """Train, measure all gradients of every step, and write their ranges to a file."""
    learning_rate, bad_every = TRAININGS[name]
    torch.manual_seed(0)
    corpus = Corpus(read_text(None), gpt.EMULATED.context)
    model = gpt.GPT(gpt.EMULATED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    scaler = castwise.GradScaler("cpu", schedule=schedules.Guard())
    with tempfile.TemporaryDirectory() as folder:
        with castwise.Monitor(model, optimizer, scaler, every=1, sinks=[folder]):
            for step in range(STEPS):
                tokens, targets = corpus.batch(gpt.EMULATED, 0, step)
                optimizer.zero_grad()
                loss = gpt.loss(model(tokens), targets)
                is_bad = bad_every and step % bad_every == bad_every - 1
                scaler.scale(loss * math.nan if is_bad else loss).backward()
                scaler.step(optimizer)
                scaler.update()
        schedules.write_trace(TRACES / f"{name}.jsonl", Run.read(folder).gradient_ranges())


def compare(path: Path) -> dict[str, Any]:
    """Return for each schedule: steps skipped, wasted, wasted after 100 steps, share flushed, and the last scale."""
    trace = schedules.read_trace(path)
    found = {}
    for name, schedule in SCHEDULES.items():
        run = schedules.simulate(trace, schedule)
        late = sum(step >= 100 and trace[step].loss_is_finite for step in run.skipped)
        found[name] = {"skipped": run.skips, "wasted": run.wasted_steps, "late": late, "flushed": run.flushed}
        found[name]["last scale"] = run.scales[-1]
    return {"steps": len(trace), "schedules": found}


def show(name: str, compared: dict[str, Any]) -> None:
    """Print a line for each schedule."""
    width = max(map(len, SCHEDULES))
    print(f"\n{name}: {compared['steps']} steps")
    print(f"{'schedule':{width}}{'skipped':>9}{'wasted':>9}{'of these late':>15}{'flushed':>10}{'last scale':>12}")
    for schedule, of in compared["schedules"].items():
        flushed = "-" if of["flushed"] is None else f"{of['flushed']:.3%}"
        scale = f"2^{math.log2(of['last scale']):g}"
        print(f"{schedule:{width}}{of['skipped']:9}{of['wasted']:9}{of['late']:15}{flushed:>10}{scale:>12}")


def result(compared: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the result file."""
    about = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "castwise": castwise.__version__,
        "date": datetime.date.today().isoformat(),
        "command": "python examples/compare_schedules.py --write",
    }
    return {"machine": about, "traces": compared}


def table(written: dict[str, Any]) -> str:
    """Return the table of a result for the manual."""
    of = {name: compared["schedules"] for name, compared in written["traces"].items()}
    lines = [
        f"| {STEPS} steps of the demo's smallest GPT | wasted: steady | spiking | bad batches "
        "| flushed: steady | bad batches |",
        "|---|---|---|---|---|---|",
    ]
    for schedule in SCHEDULES:
        wasted = [str(of[name][schedule]["wasted"]) for name in ("steady", "spiking", "bad_batches")]
        flushed = [f"{of[name][schedule]['flushed']:.3%}" for name in ("steady", "bad_batches")]
        lines.append(f"| `{schedule}` | {' | '.join([*wasted, *flushed])} |")
    return "\n".join(lines)


def write(written: dict[str, Any]) -> None:
    """Write the result, and its table between the marks of the page."""
    RESULT.write_text(json.dumps(written, indent=2) + "\n")
    before, begin, rest = PAGE.read_text().partition("<!-- schedules begins -->\n")
    _, end, after = rest.partition("<!-- schedules ends -->\n")
    PAGE.write_text(f"{before}{begin}{table(written)}\n{end}{after}")


def main(arguments: list[str]) -> None:
    """Record, compare, or write."""
    option = arguments[0] if arguments and arguments[0] in {"--record", "--write"} else None
    if option == "--record":
        TRACES.mkdir(exist_ok=True)
        for name in TRAININGS:
            record(name)
    paths = sorted(TRACES.glob("*.jsonl")) if option or not arguments else [Path(path) for path in arguments]
    compared = {path.stem: compare(path) for path in paths}
    for name, of in compared.items():
        show(name, of)
    if option == "--write":
        write(result(compared))


if __name__ == "__main__":
    main(sys.argv[1:])
