"""`{op-table}`: what autocast does to each op, found by calling the installed torch.

Torch has no table of these rules, only autocast kernels. Each such op is called with tensors of several dtypes, up to
the first op that its kernel calls: a cast, or the op itself. The tensors are fake, so any machine covers all devices.
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
    LOW: "casts floating-point inputs to the region's dtype",
    FP32: "casts fp16 and bf16 inputs to fp32",
    RESULT: "does not cast inputs, but computes and returns fp32, unless the call sets a dtype",
    WIDEST: "casts inputs of different dtypes to the widest of them",
    REFUSED: "raises `RuntimeError` for fp16 and bf16 inputs",
}


class _FirstOp(BaseException):
    """Ends a call at its first op, which it carries."""


class _StopAtFirstOp(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)
        raise _FirstOp(func, (kwargs or {}).get("dtype"))


@contextmanager
def _autocast(device: str) -> Iterator[None]:
    # Both `castwise.autocast` and torch's are disabled on machines without the device, so set the flags directly.
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
def _deprecations_silenced() -> Iterator[None]:
    # Torch writes them directly to the file descriptor, because an exception is being raised.
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
    """Return the first op that a call with such tensors reaches, and its `dtype` argument; or the exception raised."""
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
    """Return the key of `MEANING` that applies to an op.

    Raises:
        ValueError: None applies.
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
    raise ValueError(f"cannot determine what autocast does to {op} on {device}: {of_high}, {of_low}")


def rules(device: str) -> dict[str, str]:
    """Return the rule of each op on a device; all rules, if its overloads differ."""
    found: dict[str, set[str]] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), _deprecations_silenced():
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(DEVICES[device]):
            library, _, own = name.partition("::")
            if library != "aten":
                continue  # registered by another library
            bare, _, overload = own.partition(".")
            op = getattr(getattr(torch.ops.aten, bare), overload or "default")
            found.setdefault(bare, set()).add(rule(op, device))
    return {name: ", ".join(sorted(kinds)) for name, kinds in sorted(found.items())}


def table() -> str:
    """Return the rules of all devices, one op a row."""
    of_device = {device: rules(device) for device in DEVICES}
    names = sorted({name for known in of_device.values() for name in known}, key=lambda name: name.lstrip("_"))
    lines = [f"These are the rules of torch {torch.__version__}:", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {meaning} |" for name, meaning in MEANING.items()]
    lines += ["", f"| op | {' | '.join(DEVICES)} |", "|---" * (len(DEVICES) + 1) + "|"]
    for name in names:
        lines.append(f"| `{name}` | {' | '.join(known.get(name, '') for known in of_device.values())} |")
    return "\n".join(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("op-table", directive(table))
    return {"parallel_read_safe": True}
