"""`castwise demo`: a small GPT, trained in three precisions by torch.amp and by castwise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from castwise.cli.names import DEVICES, PRESETS, STRATEGIES, WEIGHTS, completing


def demo(
    context: typer.Context,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE|FOLDER", help="Text to train on. [default: the standard library]")
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
            help="Where to train. [default: cuda if there is one]",
            autocompletion=completing(*DEVICES),
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Decides the first weights and the batches.")] = 0,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar=f"[{'|'.join(STRATEGIES)}]",
            help="Split the model between processes: torchrun --nproc-per-node 2 -m castwise demo --strategy ddp",
            autocompletion=completing(*STRATEGIES),
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            metavar=f"[{'|'.join(WEIGHTS)}]",
            help="bf16-split: compare the bf16 weights of MasterWeights with fp32 ones instead, in bf16.",
            autocompletion=completing(*WEIGHTS),
        ),
    ] = "fp32",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results of runs go.")] = Path("runs"),
    checkpoint_every: Annotated[int, typer.Option(metavar="N", help="Steps between two checkpoints.")] = 50,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Continue the run in this folder, with its settings."),
    ] = None,
) -> None:
    """Train a small GPT in fp32, bf16 and fp16, with torch.amp and with castwise, and compare.

    Takes one to two minutes on two CPU cores. At its end it trains in fp16 once more, under a monitor, and writes a
    report of what happened to the numbers. With --weights bf16-split it trains twice in bf16 instead, on fp32 weights
    and on 16-bit ones, and compares losses, bytes and bits.

    Exits with 0 if both end with bit-identical weights, 1 if not, 2 if something was asked that cannot be
    done, and 130 after Ctrl-C.
    """
    from castwise.demo import command

    command.demo(context, data, preset, steps, device, seed, strategy, weights, out, checkpoint_every, resume)
