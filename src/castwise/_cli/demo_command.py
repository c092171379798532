"""`castwise demo`: train a small GPT in three precisions with torch.amp and with castwise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from castwise._cli.completion import DEVICES, WEIGHTS, completing


def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|FOLDER", help="Text to train on. [default: the source of Python's standard library]"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of each training run.")] = 150,
    device: Annotated[
        str | None,
        typer.Option(
            metavar=f"[{'|'.join(DEVICES)}]",
            help="Device to train on. [default: cuda if available, else cpu]",
            autocompletion=completing(*DEVICES),
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            metavar=f"[{'|'.join(WEIGHTS)}]",
            help="With bf16-split, compare MasterWeights (bf16) with fp32 weights instead, training in bf16.",
            autocompletion=completing(*WEIGHTS),
        ),
    ] = "fp32",
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Folder of demos; each puts the record and report of an fp16 run in its own."
        ),
    ] = Path("runs", "demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
) -> None:
    """Train a small GPT in fp32, bf16 and fp16 with torch.amp and with castwise, and compare the results.

    Takes one to two minutes on two CPU cores, and writes a report of an fp16 run.
    """
    from castwise._demo import command

    command.demo(data, steps, device, weights, out, as_json)
