"""`castwise demo`: train a small GPT in three precisions with torch.amp and with castwise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from castwise.cli.names import DEVICES, PRESETS, STRATEGIES, WEIGHTS, completing


def demo(
    context: typer.Context,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|FOLDER", help="Text to train on. [default: the source of Python's standard library]"
        ),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(metavar=f"[{'|'.join(PRESETS)}]", help="Size of the model.", autocompletion=completing(*PRESETS)),
    ] = "tiny",
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of each training run.")] = 150,
    device: Annotated[
        str | None,
        typer.Option(
            metavar=f"[{'|'.join(DEVICES)}]",
            help="Device to train on. [default: cuda if available, else cpu]",
            autocompletion=completing(*DEVICES),
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed for the initial weights and the batches.")] = 0,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar=f"[{'|'.join(STRATEGIES)}]",
            help="Train on several processes: torchrun --nproc-per-node 2 -m castwise demo --strategy ddp "
            "[default: one process]",
            autocompletion=completing(*STRATEGIES),
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
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for run results.")] = Path("runs"),
    checkpoint_every: Annotated[int, typer.Option(metavar="N", help="Steps between checkpoints.")] = 50,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Continue the run in this folder, with its settings. [default: a new run]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")] = False,
) -> None:
    """Train a small GPT in fp32, bf16 and fp16 with torch.amp and with castwise, and compare the results.

    Takes one to two minutes on two CPU cores, and writes a report of an fp16 run. Use --resume to continue after
    Ctrl-C.
    """
    from castwise.demo import command

    command.demo(context, data, preset, steps, device, seed, strategy, weights, out, checkpoint_every, resume, as_json)
