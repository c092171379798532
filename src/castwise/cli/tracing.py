"""`castwise trace`: the casts of one forward and backward of a model that a function makes."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import castwise
from castwise import WeightCache, policies
from castwise._suggestions import nearest
from castwise._user_error import UserError
from castwise.cli.policies import naming, read_policy
from castwise.policy.bound_policy import BoundPolicy
from castwise.tracing.batches import Batch
from castwise.tracing.trace_result import CAST_NUMBERS, OP_NUMBERS, Trace


def trace(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="Function without arguments that returns a model, or a tuple of a model and its batch: a tensor, "
            "several inputs, or a mapping of keyword arguments.",
        ),
    ] = "castwise.demo.gpt:example",
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SHAPE[:DTYPE]",
            help="An input, such as 8x128 or 8x128:int64, random or, for integers, of zeros; repeatable.",
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME|FILE", help=f"A file, or one of {', '.join(policies.__all__)}.")
    ] = "bf16",
    weight_cache: Annotated[
        bool, typer.Option("--weight-cache", help="Run under a WeightCache that has been filled by a forward before.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run one forward and backward of a model, and print its ops, their dtypes, and every cast.

    Exits with 0, or with 2 if something was asked that cannot be done. What the model itself raises, as for an input
    that it does not take, is Python's traceback, with 1.
    """
    try:
        net, given = _model(model, inputs)
        wanted = _policy(policy, net)
        cache = WeightCache(net) if weight_cache else None
        for _ in range(2 if weight_cache else 1):
            seen = castwise.trace(net, given, policy=wanted, weight_cache=cache)
    except UserError as error:
        typer.echo(f"castwise trace: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(seen.as_dict(), indent=2))
    else:
        _print(seen)


def _model(spelled: str, inputs: list[str] | None) -> tuple[nn.Module, Batch]:
    place, _, name = spelled.partition(":")
    if not place or not name:
        raise UserError(f"--model must be MODULE:FACTORY, got {spelled!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the folder one is in, as for python -m
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(f"{error.name}.")):
            raise  # it is there, but misses something
        raise UserError(f"there is no module {place!r}") from None
    except TypeError:
        if not place.startswith("."):
            raise
        raise UserError(f"--model must begin with the name of a module, not with a dot, got {spelled!r}") from None
    factory = getattr(module, name, None)
    if not callable(factory):
        near = nearest(name, [other for other in dir(module) if callable(getattr(module, other))])
        raise UserError(f"{place!r} has no function {name!r}{near}")
    made = _call(factory, spelled)
    net, *given = made if isinstance(made, tuple) else (made,)
    if not isinstance(net, nn.Module):
        raise UserError(f"{spelled} returned {type(net).__name__}, not a torch.nn.Module")
    if inputs:
        given = [_input(text) for text in inputs]
    elif not given:
        raise UserError(f"{spelled} returned a model without inputs for it: add --input, or return both as a tuple")
    is_batch = len(given) == 1 and isinstance(given[0], (tuple, Mapping))
    return net, given[0] if is_batch else tuple(given)


def _call(factory: Callable[..., Any], spelled: str) -> Any:
    try:
        needed = inspect.signature(factory).bind
    except (TypeError, ValueError):  # some built-in functions do not tell
        return factory()
    try:
        needed()
    except TypeError as error:
        raise UserError(f"{spelled} must be callable without arguments: {error}") from None
    return factory()


def _input(spelled: str) -> torch.Tensor:
    shape, _, dtype_name = spelled.partition(":")
    try:
        sizes = [int(size) for size in shape.split("x")]
        if min(sizes) < 0:
            raise ValueError
    except ValueError:
        raise UserError(f"--input must be a shape such as 8x128, or 8x128:int64, got {spelled!r}") from None
    dtype = getattr(torch, dtype_name or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"--input: {dtype_name!r} is not a dtype of torch")
    try:
        return torch.randn(sizes).to(dtype) if dtype.is_floating_point else torch.zeros(sizes, dtype=dtype)
    except (RuntimeError, TypeError) as error:  # too much memory, or a dtype that tensors are not made of
        raise UserError(f"--input {spelled!r}: {str(error).splitlines()[0]}") from None


def _policy(spelled: str, net: nn.Module) -> BoundPolicy:
    policy = read_policy(spelled)
    try:
        return policy.bind(net)
    except ValueError as error:
        raise UserError(naming(spelled, error)) from None


def _print(seen: Trace) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    for rows, numbers in ((seen.op_rows(), OP_NUMBERS), (seen.cast_rows(), CAST_NUMBERS)):
        table = Table(box=box.SIMPLE_HEAD, padding=0)
        for position, column in enumerate(rows[0]):
            table.add_column(column, justify="right" if position in numbers else "left")
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
    console.print(seen.summary(), highlight=False)
