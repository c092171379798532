"""Launches and waits of one iteration on the simulated accelerator, with torch.amp and with castwise.

`python -m tests.accelerator.counts` writes the table into the manual.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.accelerator.device import Counted
from tests.accelerator.training import CLIPPING, KINDS

import castwise

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "one-read.md"
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


def table() -> str:
    """Return the table in Markdown."""
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


def in_page() -> str:
    """Return the table that the manual has."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
