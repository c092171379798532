"""Measure how large the gradients of a real training run are, and which of them fp16 keeps with and without a scale.

    python -m benchmarks.gradient_exponents [--steps 100] [--scaled-steps 600]

Trains the demo's GPT in fp32, then computes the gradients of one batch from the same weights three times: in fp32, in
fp16 without scaling, and in fp16 with a scaled loss. Then trains the demo's smallest GPT in fp16 and records how the
scale moves. Writes benchmarks/results/gradient_exponents-cpu.json, which docs/pictures/loss_scaling.py draws. It
contains no times, so there is no table.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import castwise
from benchmarks import recording
from castwise._demo import gpt
from castwise._demo.corpus import Corpus, read_text
from castwise.monitor import FP16
from castwise.monitor._exponents import count, tally
from castwise.monitor._tally import Tally

SCALE = 2.0**16
GROWTH_INTERVAL = 100  # instead of 2000, so that a short run behaves like a long one


def train(model: nn.Module, corpus: Corpus, size: gpt.Size, steps: int) -> None:
    """Train in fp32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    for step in range(steps):
        tokens, targets = corpus.batch(size, 0, step)
        gpt.loss(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def counted(tensors: Iterable[torch.Tensor], scale: float) -> dict[str, Any]:
    """Count unscaled numbers by exponent."""
    total = sum((tally(count(tensor.float() / scale)) for tensor in tensors), Tally())
    assert total.nonfinite == 0, "the scale is too high for this batch"
    smallest_normal = math.log2(FP16.smallest_normal / scale)
    subnormal = sum(n for exponent, n in total.counts.items() if exponent < smallest_normal)
    return {
        "numbers": total.numel,
        "zero": total.zero,
        "share of zeros": total.zero / total.numel,
        "share below the smallest normal number of fp16": subnormal / total.numel,
        "by exponent": {str(exponent): n for exponent, n in sorted(total.counts.items())},
    }


def gradients(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], scale: float, fp16: bool) -> dict[str, Any]:
    """Run one batch, and return the exponents of the gradients of weights and of module outputs."""
    of_outputs: list[torch.Tensor] = []
    handles = [
        module.register_full_backward_hook(lambda _module, _inputs, outputs: of_outputs.append(outputs[0]))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    with castwise.autocast("cpu", dtype=torch.float16) if fp16 else nullcontext():
        loss = gpt.loss(model(batch[0]), batch[1])
    (loss * scale).backward()
    found = {
        "outputs of linear layers": counted(of_outputs, scale),
        "weights": counted([weight.grad for weight in model.parameters() if weight.grad is not None], scale),
    }
    model.zero_grad()
    for handle in handles:
        handle.remove()
    return found


def moving_scale(corpus: Corpus, steps: int) -> dict[str, Any]:
    """Train the smallest GPT in fp16, and return the scale of each step and the skipped steps."""
    torch.manual_seed(0)
    model = gpt.GPT(gpt.EMULATED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    scaler = castwise.GradScaler("cpu", growth_interval=GROWTH_INTERVAL)
    scales: list[float] = []
    skipped: list[int] = []
    for step in range(1, steps + 1):
        tokens, targets = corpus.batch(gpt.EMULATED, 0, step)
        with castwise.autocast("cpu", dtype=torch.float16):
            loss = gpt.loss(model(tokens), targets)
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.step_skipped:
            skipped.append(step)
    return {"growth_interval": GROWTH_INTERVAL, "scales": scales, "skipped": skipped, "skips": len(skipped)}


def measure(size: gpt.Size, steps: int, scaled_steps: int, corpus: Corpus | None = None) -> dict[str, Any]:
    """Return the whole record except the machine."""
    corpus = corpus or Corpus(read_text(None), size.context)
    torch.manual_seed(0)
    model = gpt.GPT(size)
    train(model, corpus, size, steps)
    batch = corpus.batch(size, 0, steps)
    return {
        "model": {"layers": size.layers, "width": size.width, "parameters": sum(p.numel() for p in model.parameters())},
        "steps": steps,
        "scale": SCALE,
        "gradients": {
            "fp32": gradients(model, batch, 1.0, fp16=False),
            "fp16": gradients(model, batch, 1.0, fp16=True),
            "fp16, scaled": gradients(model, batch, SCALE, fp16=True),
        },
        "run": moving_scale(corpus, scaled_steps),
    }


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--scaled-steps", type=int, default=600)
    options = parser.parse_args()
    found = {"machine": recording.machine(), **measure(gpt.SIZES["tiny"], options.steps, options.scaled_steps)}
    path = recording.HERE / "results" / "gradient_exponents-cpu.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    shares = {name: kinds["outputs of linear layers"]["share of zeros"] for name, kinds in found["gradients"].items()}
    print(f"gradients of outputs that are zero: {shares}; skipped {found['run']['skipped']}")


if __name__ == "__main__":
    main()
