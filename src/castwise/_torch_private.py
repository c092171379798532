"""Every private torch name that castwise reaches, in one place, so that a new torch release is checked in one place.

Checked against torch 2.13.0 and the 2.11 sources. `torch._foreach_*` and `torch._amp_*` are native ops,
used where they are needed and not repeated here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import _jit_internal as jit_internal
from torch._C import _are_functorch_transforms_active as are_functorch_transforms_active
from torch._C import _get_privateuse1_backend_name as privateuse1_backend_name
from torch._C import _is_autocast_available as is_autocast_available
from torch._C import _is_torch_function_mode_enabled as is_torch_function_mode_enabled
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = [
    "TO_COPY",
    "TorchDispatchMode",
    "after_tracing",
    "are_functorch_transforms_active",
    "at_the_end_of_this_backward",
    "compile_backwards_as",
    "compile_backwards_without_autocast",
    "device_types_of",
    "fsdp_mixed_precision",
    "graph_node_running",
    "graph_nodes_made",
    "holders_of",
    "is_autocast_available",
    "is_fsdp_flattened",
    "is_gathered_by_fsdp",
    "is_torch_function_mode_enabled",
    "jit_internal",
    "never_traced",
    "only_inlined",
    "privateuse1_backend_name",
    "record_enter_autocast",
    "record_exit_autocast",
    "run_while_tracing",
    "stored_values",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "version",
]


TO_COPY = torch.ops.aten._to_copy.default  # what `Tensor.to` comes down to

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


class _BackwardsSetting:
    """How this thread compiles backwards: a setting of `torch._functorch.config`.

    It is what getattr and setattr on that module come down to, in a fifth of the time.
    """

    _NAME = "backward_pass_autocast"

    def __init__(self) -> None:
        from torch._functorch import config
        from torch.utils._config_module import _UNSET_SENTINEL

        self._settings: Any = config
        self.defaults = (_UNSET_SENTINEL, "same_as_forward")
        self.value: Any = getattr(self._settings._config.get(self._NAME), "user_override", None)
        # Before torch 2.13 a setting is not of a thread, and none is changed.
        self.is_of_thread = isinstance(self.value, ContextVar)
        if self.is_of_thread:
            self._is_hash_outdated, self._outdated = config._hash_dirty_var, config._get_dict_dirty_keys_var  # type: ignore[attr-defined]

    def set(self, value: object) -> None:
        self.value.set(value)
        if not self._is_hash_outdated.get():
            self._is_hash_outdated.set(True)
        if self._outdated.get() is not None:
            self._settings._mark_get_dict_dirty(self._NAME)


_backwards: _BackwardsSetting | None = None  # found by the first region: whoever enters none shall not wait for it


def compile_backwards_without_autocast() -> object:
    """Have what this thread compiles run its backwards outside of autocast; return what undoes it, or None.

    The default, "same_as_forward", traces them in the state in which the forward is called. What the user has set
    otherwise is left.
    """
    global _backwards
    if _backwards is None:
        _backwards = _BackwardsSetting()
    if not _backwards.is_of_thread:
        return None
    before: object = _backwards.value.get()
    if before not in _backwards.defaults:
        return None
    _backwards.set("off")
    return before


def compile_backwards_as(setting: object) -> None:
    """Undo `compile_backwards_without_autocast`, which has returned the setting."""
    if _backwards is not None:
        _backwards.set(setting)


def at_the_end_of_this_backward(function: Callable[[], None]) -> None:
    """Let autograd, which is running a hook, call a function when the backward is done."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def graph_nodes_made() -> int:
    """Return how many nodes of autograd graphs this thread has made: a forward makes some, no change by hand does."""
    return torch._C._autograd._get_sequence_nr()


def graph_node_running() -> int | None:
    """Return which of the nodes that a thread has made a backward runs right now; None outside of a backward."""
    if torch._C._current_graph_task_id() == -1:
        return None
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def fsdp_mixed_precision(module: torch.nn.Module) -> Any:
    """Return the `MixedPrecisionPolicy` of a module that `fully_shard` has made a unit, or None."""
    state = getattr(module, "_get_fsdp_state", None)
    return None if state is None else state()._mp_policy


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


def is_gathered_by_fsdp(param: torch.Tensor) -> bool:
    """Say whether `fully_shard` has put a parameter together for a forward; it writes there again without a trace."""
    composable = sys.modules.get("torch.distributed._composable_state")
    for state in [] if composable is None else list(composable._module_state_mapping.values()):
        groups = getattr(state(), "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.13 there is one at most
            groups = filter(None, [getattr(state(), "_fsdp_param_group", None)])
        for group in groups:
            if any(getattr(of_fsdp, "_unsharded_param", None) is param for of_fsdp in group.fsdp_params):
                return True
    return False


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
