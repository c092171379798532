"""`castwise trace`: show the casts and ops of one forward and backward."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

import castwise
from castwise._cli.completion import POLICIES, complete_policy
from castwise._cli.model_errors import MODEL_ERROR, print_from_model
from castwise._cli.option_checks import check_policy, check_target
from castwise._terminal import new_console
from castwise._user_error import UserError

if TYPE_CHECKING:
    from castwise.tracing._trace_result import Trace


def trace(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODULE|FILE:FACTORY",
            help="Function in a module or .py file that takes no arguments and returns a model, or a tuple of a model "
            "and its batch: a tensor, several inputs, or a mapping of keyword arguments. The default is a small GPT.",
        ),
    ] = "castwise._demo.gpt:example",
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SHAPE[:DTYPE]",
            help="Shape of an input, such as 8x128 or 8x128:int64; repeatable. Floats are random, integers zero. "
            "[default: the factory's batch]",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help=f"A policy file, or one of {', '.join(POLICIES)}.",
            autocompletion=complete_policy,
        ),
    ] = "bf16",
    weight_cache: Annotated[
        bool, typer.Option("--weight-cache", help="Run with a WeightCache filled by an earlier forward.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show every cast and every op of one forward and backward of a model, with their dtypes."""
    try:
        check_target(model)
        check_policy(policy)
        from castwise._cli.traced_model import find_model, find_policy  # loads torch, which takes seconds

        net, given = find_model(model, inputs)
        wanted = find_policy(policy, net)
        cache = castwise.WeightCache(net) if weight_cache else None
        for _ in range(2 if weight_cache else 1):
            seen = castwise.trace(net, given, policy=wanted, weight_cache=cache)
    except UserError as error:
        typer.echo(f"castwise trace: {error}", err=True)
        raise typer.Exit(2) from None
    except Exception as error:
        print_from_model(error)
        raise typer.Exit(MODEL_ERROR) from None
    if as_json:
        typer.echo(json.dumps(seen.as_dict(), indent=2))
    else:
        _print(seen)


def _print(seen: Trace) -> None:
    from castwise.tracing._trace_result import CAST_NUMBERS, OP_NUMBERS

    console = new_console(width=160)
    for rows, numbers in ((seen.cast_rows(), CAST_NUMBERS), (seen.op_rows(), OP_NUMBERS)):
        table = Table(box=box.SIMPLE_HEAD, padding=0)
        for position, column in enumerate(rows[0]):
            table.add_column(column, justify="right" if position in numbers else "left")
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
    console.print(seen.summary())
