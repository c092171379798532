"""`{op-table}`: what autocast does to each op that it knows, asked of the torch that is installed.

Torch keeps no table that says so: an op has an autocast kernel, or not. So each of them is called with tensors of one
dtype and another, down to the first op that its kernel calls: a cast, or the op itself. Tensors are fake: of any
device, on any machine.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from generated import directive
from sphinx.application import Sphinx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICES = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}
LOW, FP32, RESULT, WIDEST, REFUSED = "low", "fp32", "fp32 result", "widest", "refused"
MEANING = {
    LOW: "floating-point inputs are cast to the region's dtype",
    FP32: "inputs in fp16 or bf16 are cast to fp32",
    RESULT: "inputs stay as they are; the op is asked to compute and return fp32, unless a dtype is given",
    WIDEST: "inputs of several dtypes are cast to the widest of them",
    REFUSED: "raises `RuntimeError` for inputs in fp16 or bf16",
}


class _FirstOp(BaseException):
    """Stops a call where it comes to."""


class _StopAtFirstOp(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)
        raise _FirstOp(func, (kwargs or {}).get("dtype"))


@contextmanager
def _autocast(device: str) -> Iterator[None]:
    # A region of `castwise.autocast("cuda")` or torch's is off where there is no such device; what it sets is this.
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.set_autocast_cache_enabled(before[2])


@contextmanager
def _deprecations_unsaid() -> Iterator[None]:
    # Torch writes them to the file itself, as an exception is under way.
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _given(kind: str, tensors: Iterator[torch.Tensor]) -> Any:
    if kind in {"Tensor", "Optional[Tensor]"}:
        return next(tensors)
    if "Tensor" in kind:
        return [next(tensors), next(tensors)]
    if kind.startswith("List"):
        return [1]
    return {"float": 1.0, "bool": False, "str": "none"}.get(kind, None if kind.startswith("Optional") else 1)


def _first(op: Any, device: str, first: torch.dtype, others: torch.dtype) -> tuple[Any, Any] | Exception:
    """Return the first op that a call with such tensors comes to, and the dtype it asks for; or what is raised."""
    dtypes = itertools.chain([first], itertools.repeat(others))
    tensors = (torch.empty(2, 2, 2, 2, device=device, dtype=dtype) for dtype in dtypes)
    wanted = [each for each in op._schema.arguments if "Tensor" in str(each.type) or not each.has_default_value()]
    given = {each.name: _given(str(each.type), tensors) for each in wanted}
    try:
        with _autocast(device), _StopAtFirstOp():
            op(**given)
    except _FirstOp as found:
        return found.args[0], found.args[1]
    except Exception as error:
        return error
    return None, None


def rule(op: Any, device: str) -> str:
    """Return which of `MEANING` holds of an op.

    Raises:
        ValueError: None.
    """
    low, high = torch.bfloat16, torch.float32
    cast = torch.ops.aten._to_copy.default
    of_high = _first(op, device, high, high)
    of_low = _first(op, device, low, low)
    if of_high == (cast, low):
        return LOW
    if of_low == (cast, high):
        return FP32
    if isinstance(of_low, RuntimeError) and "unsafe to autocast" in str(of_low):
        return REFUSED
    if isinstance(of_low, tuple) and of_low[1] is high:
        return RESULT
    if (cast, high) in (_first(op, device, low, high), _first(op, device, high, low)):
        return WIDEST
    raise ValueError(f"what autocast does to {op} on {device} cannot be told: {of_high}, {of_low}")


def rules(device: str) -> dict[str, str]:
    """Return by op what autocast does to it on a device; of overloads that differ, each."""
    found: dict[str, set[str]] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), _deprecations_unsaid():
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(DEVICES[device]):
            library, _, own = name.partition("::")
            if library != "aten":
                continue  # of another library, in this process by chance
            bare, _, overload = own.partition(".")
            op = getattr(getattr(torch.ops.aten, bare), overload or "default")
            found.setdefault(bare, set()).add(rule(op, device))
    return {name: ", ".join(sorted(kinds)) for name, kinds in sorted(found.items())}


def table() -> str:
    """Return the rules of all devices, one op a row."""
    of_device = {device: rules(device) for device in DEVICES}
    names = sorted({name for known in of_device.values() for name in known}, key=lambda name: name.lstrip("_"))
    lines = [f"As torch {torch.__version__} has it:", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {meaning} |" for name, meaning in MEANING.items()]
    lines += ["", f"| op | {' | '.join(DEVICES)} |", "|---" * (len(DEVICES) + 1) + "|"]
    for name in names:
        lines.append(f"| `{name}` | {' | '.join(known.get(name, '') for known in of_device.values())} |")
    return "\n".join(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("op-table", directive(table))
    return {"parallel_read_safe": True}
