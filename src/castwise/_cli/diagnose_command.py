"""`castwise diagnose`: replay the capsule of a fault."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from castwise._cli.model_errors import MODEL_ERROR, print_from_model
from castwise._cli.option_checks import check_target
from castwise._user_error import UserError

if TYPE_CHECKING:
    from castwise.diagnosis import Capsule


def _file(capsule: Path) -> Path:
    """Return the path of a file; called before options that are missing are refused."""
    if not os.path.isfile(capsule):  # which raises nothing
        typer.echo(
            f"castwise diagnose: there is no file {capsule}: castwise run writes capsule-N.safetensors into the run's "
            "folder",
            err=True,
        )
        raise typer.Exit(2)
    return capsule


def diagnose(
    capsule: Annotated[
        Path, typer.Argument(metavar="CAPSULE", callback=_file, help="A file capsule-N.safetensors of a run.")
    ],
    model: Annotated[
        str,
        typer.Option(
            metavar="MODULE|FILE:FACTORY",
            help="Function in a module or .py file that takes no arguments and returns the model of the run.",
        ),
    ],
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE|FILE:FUNCTION",
            help="Function that maps the model's output to the loss. [default: the recorded gradients of the output]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Replay the fault of a run, op by op, with the weights and the batch in its capsule."""
    try:
        check_target(model)
        from castwise._cli.traced_model import find_factory, find_function  # loads torch, which takes seconds

        read = _read(capsule)
        net = find_factory(model)
        loss_fn = None if loss is None else find_function(loss, "--loss")
        found = read.diagnose(net, loss_fn)
        difference = read.first_difference(net) if read.ops else None
    except (UserError, ValueError) as error:
        typer.echo(f"castwise diagnose: {error}", err=True)
        raise typer.Exit(2) from None
    except Exception as error:
        print_from_model(error)
        raise typer.Exit(MODEL_ERROR) from None
    if as_json:
        facts = {"step": read.step, "recorded": read.text, "replayed": str(found), "remedy": found.advice}
        same = None if difference is None else not difference
        typer.echo(json.dumps({**facts, "same_bits": same, "first_difference": difference or ""}))
        return
    typer.echo(f"{read.model}, step {read.step:,}, {read.machine}")
    typer.echo("" if read.has_weights else "The capsule has no weights: the model's own are used.\n")
    typer.echo(str(found))
    typer.echo(f"\n{_compared(read, difference)}")


def _read(path: Path) -> Capsule:
    from castwise.diagnosis import Capsule

    try:
        return Capsule.read(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _compared(capsule: Capsule, difference: str | None) -> str:
    if difference is None:
        return "The capsule has no results of ops to compare with."
    if difference:
        return f"The replay differs from the run: {difference}."
    return f"All {capsule.ops:,} ops gave the bits of the run."
