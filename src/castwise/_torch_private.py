"""Every private torch name that castwise reaches, in one place, so that a new torch release is checked in one place.

Checked against torch 2.13.0 and the 2.11 sources. `torch._foreach_*` and `torch._amp_*` are native ops,
used where they are needed and not repeated here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import _jit_internal as jit_internal
from torch._C import _are_functorch_transforms_active as are_functorch_transforms_active
from torch._C import _get_privateuse1_backend_name as privateuse1_backend_name
from torch._C import _is_autocast_available as is_autocast_available
from torch._C import _is_torch_function_mode_enabled as is_torch_function_mode_enabled
from torch._C._dynamo import eval_frame

__all__ = [
    "after_tracing",
    "are_functorch_transforms_active",
    "at_the_end_of_this_backward",
    "device_types_of",
    "graph_nodes_made",
    "holders_of",
    "is_autocast_available",
    "is_fsdp_flattened",
    "is_torch_function_mode_enabled",
    "jit_internal",
    "never_traced",
    "only_inlined",
    "privateuse1_backend_name",
    "record_enter_autocast",
    "record_exit_autocast",
    "run_while_tracing",
    "stored_values",
    "version",
]


_Run = TypeVar("_Run", bound=Callable[..., None])


def run_while_tracing(function: _Run) -> _Run:
    """Mark a function without tensors that Dynamo shall run when it meets a call of it, and leave out of the graph.

    `torch.compiler.assume_constant_result` does the same but imports all of Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_Function = TypeVar("_Function", bound=Callable[..., Any])


def only_inlined(function: _Function) -> _Function:
    """Keep Dynamo from compiling a function for itself, as it does with every call after a graph break.

    Within a function that is compiled it is traced all the same.
    """
    _skip(function, eval_frame._FrameAction.DEFAULT)
    return function


def never_traced(function: _Function) -> _Function:
    """Keep Dynamo away from a function and from all that it calls: a call of it is a graph break.

    `torch.compiler.disable` does the same but imports all of Dynamo.
    """
    _skip(function, eval_frame._FrameAction.SKIP)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def _skip(function: Callable[..., Any], callees: eval_frame._FrameAction) -> None:
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, callees)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def after_tracing(function: Callable[[], None]) -> None:
    """Let Dynamo, which is tracing, call a function when it ends or gives up; the last one comes first."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    InstructionTranslator.current_tx().output.add_cleanup_hook(function)


def at_the_end_of_this_backward(function: Callable[[], None]) -> None:
    """Let autograd, which is running a hook, call a function when the backward is done."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def graph_nodes_made() -> int:
    """Return how many nodes of autograd graphs this thread has made: a forward makes some, no change by hand does."""
    return torch._C._autograd._get_sequence_nr()


def holders_of(tensor: torch.Tensor) -> int:
    """Return how many tensors share a tensor's memory, plus a constant."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def version(tensor: torch.Tensor) -> int:
    """Return a tensor's count of writes; tensors of inference mode keep none."""
    return 0 if tensor.is_inference() else tensor._version


def stored_values(sparse: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse COO tensor, coalesced or not, in memory shared with it."""
    return sparse._values()


def device_types_of(group: Any) -> list[str]:
    """Return the types of device whose tensors a process group can reduce."""
    return [device.type for device in group._device_types]


def is_fsdp_flattened(param: torch.Tensor) -> bool:
    """Say whether FullyShardedDataParallel manages a parameter, which then holds what is on this rank."""
    return getattr(param, "_fsdp_flattened", False)


def _exporting_mode() -> Any:
    """Return the mode with which `torch.export` records what is not an op, or None outside of an export."""
    # The module is loaded by whoever exports; importing it here would slow down everybody else.
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxy_tensor is None:
        return None
    modes: list[Any] = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    for mode in modes:
        if isinstance(mode, proxy_tensor.PreDispatchTorchFunctionMode):
            return mode
    return None


def _record(name: str, args: tuple[object, ...]) -> None:
    mode = _exporting_mode()
    if mode is not None:
        # An exported program must run where castwise is not installed, so the node in its graph is torch's.
        mode.__torch_function__(getattr(torch.amp, name), (), args)


record_enter_autocast: Callable[[tuple[object, ...]], None] = functools.partial(_record, "_enter_autocast")
record_exit_autocast: Callable[[tuple[object, ...]], None] = functools.partial(_record, "_exit_autocast")
