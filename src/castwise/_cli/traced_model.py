"""Load the model, inputs and policy that a command's options name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from castwise._cli.option_checks import check_target
from castwise._cli.policy_options import naming, read_policy
from castwise._suggestions import listed, nearest
from castwise._user_error import UserError
from castwise.policy._bound_policy import BoundPolicy
from castwise.tracing._batches import Batch

_NAMES_SHOWN = 8
_OF_FILE = "__traced__"  # not the name of a real module


def find_model(text: str, inputs: list[str] | None) -> tuple[nn.Module, Batch]:
    """Build the model that `--model` names, and return it with its batch.

    Raises:
        UserError: There is no such function, it does not return a model, or there is no batch.
    """
    made = _made_by(text)
    net, *given = made if isinstance(made, tuple) else (made,)
    if not isinstance(net, nn.Module):
        raise UserError(f"{text} returned {type(net).__name__}, not a torch.nn.Module")
    if inputs:
        given = [_input(text) for text in inputs]
    elif not given:
        raise UserError(f"{text} returned a model without inputs: add --input, or return both as a tuple")
    is_batch = len(given) == 1 and isinstance(given[0], (tuple, Mapping))
    return net, given[0] if is_batch else tuple(given)


def find_task(text: str) -> tuple[nn.Module, list[Any], Callable[[Any, Any], torch.Tensor]]:
    """Build the task that `--model` of `castwise compare` names: a model, batches of inputs and targets, and a loss.

    Raises:
        UserError: There is no such function, or it returns something else.
    """
    made = _made_by(text)
    if not isinstance(made, tuple) or len(made) != 3:
        kind = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
        raise UserError(f"{text} must return a model, a list of (inputs, targets), and a loss function, got {kind}")
    net, batches, loss = made
    if not isinstance(net, nn.Module):
        raise UserError(f"{text} returned {type(net).__name__}, not a torch.nn.Module")
    if not callable(loss):
        raise UserError(f"{text} returned {type(loss).__name__}, not a function of outputs and targets")
    return net, batches, loss


def find_factory(text: str) -> nn.Module:
    """Build the model that `--model` names, without inputs.

    Raises:
        UserError: There is no such function, or it does not return a model.
    """
    made = _made_by(text)
    net = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(net, nn.Module):
        raise UserError(f"{text} returned {type(net).__name__}, not a torch.nn.Module")
    return net


def _made_by(text: str) -> Any:
    return _call(find_function(text), text)


def find_function(text: str, option: str = "--model") -> Callable[..., Any]:
    """Return the function that an option names.

    Raises:
        UserError: There is no such function.
    """
    module_or_file, name = check_target(text, option)
    module = _run_file(Path(module_or_file)) if module_or_file.endswith(".py") else _import_module(module_or_file)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise UserError(f"{module_or_file!r} has no function {name!r}{_instead_of(name, module)}")
    return factory  # type: ignore[no-any-return]  # a module's attribute


def _instead_of(name: str, module: ModuleType) -> str:
    """Return the end of an error about a missing function: the names nearest to it, or else the module's functions."""
    near = nearest(name, [other for other in dir(module) if callable(getattr(module, other))])
    own = [other for other, value in vars(module).items() if inspect.isfunction(value) and other[0] != "_"]
    own = [other for other in own if vars(module)[other].__module__ == module.__name__]
    if near or not own:
        return near or "; name a function that takes no arguments and returns the model"
    more = f" and {len(own) - _NAMES_SHOWN} more" if len(own) > _NAMES_SHOWN else ""
    return f"; its functions are {listed(own[:_NAMES_SHOWN])}{more}"


def _run_file(path: Path) -> ModuleType:
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path given to --model") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path} is not a Python file: {error}") from None
    module = sys.modules[_OF_FILE] = ModuleType(_OF_FILE)  # dataclasses look up their module
    module.__file__ = str(path)
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script, so that it can import its neighbours
    exec(code, vars(module))
    return module


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder, as for python -m
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module exists, but one of its imports does not
        raise UserError(
            f"there is no module {name!r}: check its name, or give FILE:FACTORY, such as models/gpt.py:make"
        ) from None
    except TypeError:
        if not name.startswith("."):
            raise
        raise UserError(f"--model must begin with the name of a module, not with a dot, got {name!r}") from None


def _call(factory: Callable[..., Any], text: str) -> Any:
    try:
        needed = inspect.signature(factory).bind
    except (TypeError, ValueError):  # some built-in functions have no signature
        return factory()
    try:
        needed()
    except TypeError as error:
        raise UserError(f"{text} must be callable without arguments: {error}") from None
    return factory()


def _input(text: str) -> torch.Tensor:
    shape, _, dtype_name = text.partition(":")
    try:
        sizes = [int(size) for size in shape.split("x")]
        if min(sizes) < 0:
            raise ValueError
    except ValueError:
        raise UserError(f"--input must be a shape such as 8x128, or 8x128:int64, got {text!r}") from None
    dtype = getattr(torch, dtype_name or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"--input: {dtype_name!r} is not a dtype of torch")
    try:
        return torch.randn(sizes).to(dtype) if dtype.is_floating_point else torch.zeros(sizes, dtype=dtype)
    except (RuntimeError, TypeError) as error:  # out of memory, or a dtype that tensors cannot have
        raise UserError(f"--input {text!r}: {str(error).splitlines()[0]}") from None


def find_policy(text: str, net: nn.Module) -> BoundPolicy:
    """Return a policy by name or from a file, bound to a model.

    Raises:
        UserError: There is no such policy, or it does not fit the model.
    """
    policy = read_policy(text)
    try:
        return policy.bind(net)
    except ValueError as error:
        raise UserError(naming(text, error)) from None
