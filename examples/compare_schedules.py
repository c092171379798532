"""Compare schedules of the scale on recorded trainings: how many steps each would have wasted, and what it flushes.

    python examples/compare_schedules.py [TRACE ...]
    python examples/compare_schedules.py --record    # train the demo's model and write the traces anew

The traces are of 600 steps of `castwise demo`'s smallest GPT: as it is, with a learning rate at which gradients spike,
and with a batch now and then whose loss is not finite. They were recorded in fp32, so that no gradient was lost before
it was looked at. Only gradients of weights are in them; those of activations may overflow earlier.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

import torch

import castwise
from castwise import schedules
from castwise.cli.demo import gpt
from castwise.cli.demo.corpus import Corpus, read_text
from castwise.monitor.run import Run

TRACES = Path(__file__).parent / "traces"
STEPS = 600
# By name: the learning rate, and every how-manieth batch is bad.
TRAININGS = {"steady": (5e-4, 0), "spiking": (2e-2, 0), "bad_batches": (5e-4, 97)}

SCHEDULES = {
    "Dynamic (torch)": schedules.Dynamic(),
    "Dynamic, every 100": schedules.Dynamic(growth_interval=100),
    "Dynamic, Megatron-LM": schedules.Dynamic(2.0**32, growth_interval=1000, hysteresis=2, min_scale=1.0),
    "Dynamic, hold": schedules.Dynamic(growth_interval=100, on_nonfinite_loss="hold"),
    "Static 2^10": schedules.Static(2.0**10),
    "Guard": schedules.Guard(),
    "Headroom": schedules.Headroom(),
    "Headroom, 1 bit": schedules.Headroom(headroom_bits=1.0),
}


def record(name: str) -> None:
    """Train, look at all gradients of every step, and write their ranges to a file."""
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


def compare(path: Path) -> None:
    """Print a line for each schedule: steps skipped, wasted among them, wasted after 100 steps, gradients flushed."""
    trace = schedules.read_trace(path)
    print(f"\n{path.stem}: {len(trace)} steps")
    print(f"{'schedule':22}{'skipped':>9}{'wasted':>9}{'of these late':>15}{'flushed':>10}{'last scale':>12}")
    for name, schedule in SCHEDULES.items():
        run = schedules.simulate(trace, schedule)
        late = sum(step >= 100 and trace[step].loss_is_finite for step in run.skipped)
        flushed = "-" if run.flushed is None else f"{run.flushed:.3%}"
        scale = f"2^{math.log2(run.scales[-1]):g}"
        print(f"{name:22}{run.skips:9}{run.wasted_steps:9}{late:15}{flushed:>10}{scale:>12}")


def main(arguments: list[str]) -> None:
    """Record, or compare."""
    if arguments == ["--record"]:
        TRACES.mkdir(exist_ok=True)
        for name in TRAININGS:
            record(name)
    for path in map(Path, [] if arguments == ["--record"] else arguments):
        compare(path)
    if not arguments or arguments == ["--record"]:
        for path in sorted(TRACES.glob("*.jsonl")):
            compare(path)


if __name__ == "__main__":
    main(sys.argv[1:])
