"""Launches and waits of one iteration on the simulated accelerator, with torch.amp and with castwise.

`python -m tests.accelerator.counts` writes the tables into the manual.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.accelerator.device import Counted
from tests.accelerator.kernels import compiled_codecs
from tests.accelerator.training import CLIPPING, KINDS
from tests.master_weights.training import buckets_of

import castwise

_EXPLANATION = Path(__file__).parents[2] / "docs" / "explanation"
STEPS, LOW_STEPS = _EXPLANATION / "one-read.md", _EXPLANATION / "master-weights.md"
BEGIN, END = "<!-- accelerator_counts begins -->\n", "<!-- accelerator_counts ends -->"
TENSORS, WARM = 10, 4
NAMES = {
    "none": "none",
    "clip_grad_norm_": "`clip_grad_norm_` of the scaler",
    "unscale_ and torch's": "`unscale_`, then torch's",
}


def counted(library: Any, kind: str, clipping: str) -> Counted:
    """Return the counts from `scale` to `update`, after some iterations."""
    params = [torch.nn.Parameter(torch.ones(16, device="sim")) for _ in range(TENSORS)]
    optimizer = torch.optim.AdamW(params, lr=0.01, **KINDS[kind])
    scaler, loss = library.GradScaler("sim", init_scale=2.0**10), torch.ones((), device="sim")
    grads = [torch.ones(16, device="sim") for _ in params]
    for _ in range(WARM + 1):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        with Counted() as counts:
            scaler.scale(loss)
            if clipping == "clip_grad_norm_" and library is castwise:
                scaler.clip_grad_norm_(optimizer, 1.0)
            elif clipping != "none":
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
    return counts


PARAMETERS_OF_GPT2 = 124_439_808


class OfGPT2(NamedTuple):
    """What a step of GPT-2's parameters asks of the device."""

    counts: Counted
    moved: float
    """Bytes that are read and written, per weight."""
    workspace: float
    """In bytes, per weight."""
    ms: float
    """By the model of `Counted.modelled_ms`, for all of GPT-2's weights."""


def of_gpt2(options: dict[str, Any] | None, *, scaled: bool = False, compiles: bool = True) -> OfGPT2:
    """Count a step of fused AdamW with the 148 parameters of GPT-2, an eighth of each dimension.

    Args:
        options: Those of `MasterWeights`; None for fp32 weights.
        scaled: Whether a scaler clips the gradients by their norm and steps.
        compiles: Whether codecs are compiled.
    """
    width = 96
    of_block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    of_block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    shapes = [(50257 // 8, width), (128, width), *(12 * of_block), (width,), (width,)]
    params = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes).to("sim")
    optimizer: Any = torch.optim.AdamW(params, fused=True)
    with pytest.MonkeyPatch.context() as patch, buckets_of(4096):
        if compiles:
            compiled_codecs(patch)
        if options is not None:
            optimizer = castwise.MasterWeights(optimizer, params, narrow="all", **options)
        scaler, loss = castwise.GradScaler("sim", enabled=scaled), torch.ones((), device="sim")
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            with Counted() as counts:
                scaler.scale(loss)
                if scaled:
                    scaler.clip_grad_norm_(optimizer, 1.0)
                scaler.step(optimizer)
                scaler.update()
    length = sum(param.numel() for param in params)
    workspace = 0 if options is None else optimizer.memory()["workspace"]
    ms = counts.modelled_ms(PARAMETERS_OF_GPT2 / length)
    return OfGPT2(counts, counts.bytes / length, workspace / length, ms)


def steps_table() -> str:
    """Return the table of steps in Markdown."""
    lines = [
        "| AdamW | clipping | launches: torch.amp | castwise | waits: torch.amp | castwise |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        for clipping in CLIPPING:
            theirs, ours = (counted(library, kind, clipping) for library in (torch.amp, castwise))
            numbers = (theirs.launches, ours.launches, theirs.host_waits, ours.host_waits)
            lines.append(f"| {kind} | {NAMES[clipping]} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines) + "\n"


BF16 = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
INT8 = {"exp_avg": "int8_blockwise", "exp_avg_sq": "int8_blockwise"}
LOW_ROWS: dict[str, dict[str, Any]] = {
    "fp32 weights": {"options": None},
    "split": {"options": {}},
    "split, without a compiler": {"options": {}, "compiles": False},
    "split, float16": {"options": {"dtype": torch.float16}},
    "stochastic": {"options": {"method": "stochastic"}},
    "split, states in bf16": {"options": {"state_dtype": BF16}},
    "split, states in 8 bits": {"options": {"state_dtype": INT8}},
}


def low_steps_table() -> str:
    """Return the table of `MasterWeights` in Markdown."""
    lines = [
        "| | launches | waits | bytes moved per weight | workspace, bytes per weight | time by a model |",
        "|---|---|---|---|---|---|",
    ]
    fp32 = of_gpt2(None).ms
    for name, settings in LOW_ROWS.items():
        counts, moved, workspace, ms = of_gpt2(**settings)
        lines.append(
            f"| {name} | {counts.launches} | {counts.host_waits} | {moved:.0f} | {workspace:.1f} | {ms / fp32:.1f} |"
        )
    return "\n".join(lines) + "\n"


TABLES = {STEPS: steps_table, LOW_STEPS: low_steps_table}


def in_page(page: Path) -> str:
    """Return the table that a page of the manual has."""
    return page.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    for page, table in TABLES.items():
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
