"""Every private torch name that castwise reaches, in one place, so that a new torch release is checked in one place.

Checked against torch 2.13.0 and the 2.11 sources. `torch._foreach_*` and `torch._amp_*` are native ops,
used where they are needed and not repeated here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import _jit_internal as jit_internal
from torch._C import DisableTorchFunctionSubclass as PlainFunctions
from torch._C import _are_functorch_transforms_active as are_functorch_transforms_active
from torch._C import _get_privateuse1_backend_name as privateuse1_backend_name
from torch._C import _is_torch_function_mode_enabled as is_torch_function_mode_enabled
from torch._C import _is_tracing as is_jit_tracing
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "TO_COPY",
    "PlainFunctions",
    "TorchDispatchMode",
    "after_tracing",
    "are_functorch_transforms_active",
    "at_the_end_of_this_backward",
    "backward_running",
    "compile_anew",
    "compile_backwards_as",
    "compile_backwards_without_autocast",
    "device_types_of",
    "fsdp_mixed_precision",
    "graph_node_running",
    "graph_nodes_made",
    "holders_of",
    "is_autocast_available",
    "is_backward_running",
    "is_compiled",
    "is_fsdp_flattened",
    "is_gathered_by_fsdp",
    "is_jit_tracing",
    "is_torch_function_mode_enabled",
    "jit_internal",
    "leaf_running",
    "load_compiler",
    "never_traced",
    "no_post_accumulate_hooks",
    "number_of_node",
    "only_inlined",
    "privateuse1_backend_name",
    "record_enter_autocast",
    "record_exit_autocast",
    "run_while_tracing",
    "scaled_mm",
    "schema_of",
    "stored_values",
    "tree_leaves",
    "tree_map",
    "version",
]


TO_COPY = torch.ops.aten._to_copy.default  # what `Tensor.to` comes down to

_Run = TypeVar("_Run", bound=Callable[..., object])


def run_while_tracing(function: _Run) -> _Run:
    """Mark a function without tensors that Dynamo shall run when it meets a call of it, and leave out of the graph.

    `torch.compiler.assume_constant_result` does the same but imports all of Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a mark for torch
    return function


@run_while_tracing
def is_autocast_available(device_type: str) -> bool:
    """Say whether torch can autocast on a type of device. Before torch 2.13 Dynamo cannot trace what it asks."""
    return torch._C._is_autocast_available(device_type)


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
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # a mark for torch
    return function


def _skip(function: Callable[..., Any], callees: eval_frame._FrameAction) -> None:
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, callees)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def compile_anew(function: Callable[..., Any]) -> None:
    """Have Dynamo forget what it has compiled of a function."""
    if "torch._dynamo" in sys.modules and hasattr(function, "__code__"):
        eval_frame.reset_code(function.__code__)


def after_tracing(function: Callable[[], None]) -> None:
    """Let Dynamo, which is tracing, call a function when it ends or gives up; the last one comes first."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    InstructionTranslator.current_tx().output.add_cleanup_hook(function)


def load_compiler() -> None:
    """Load Dynamo, and have it look up by name the classes and functions of torch that it treats by themselves."""
    from torch._dynamo import trace_rules

    trace_rules.get_torch_obj_rule_map()


class _BackwardsSetting:
    """How this thread compiles backwards: a setting of `torch._functorch.config`."""

    NAME = "backward_pass_autocast"

    def __init__(self) -> None:
        from torch._functorch import config
        from torch.utils._config_module import _UNSET_SENTINEL

        self.settings: Any = config
        self.defaults = (_UNSET_SENTINEL, "same_as_forward")
        self.value: Any = getattr(self.settings._config.get(self.NAME), "user_override", None)
        # Before torch 2.13 a setting is not of a thread, and none is changed.
        self.is_of_thread = isinstance(self.value, ContextVar)
        if self.is_of_thread:
            self.is_hash_outdated: Any = self.settings._hash_dirty_var
            self.outdated: Any = self.settings._get_dict_dirty_keys_var


_backwards: Any = None  # found by the first region: whoever enters none shall not wait for it


@only_inlined
def compile_backwards_without_autocast() -> object:
    """Have what this thread compiles run its backwards outside of autocast; return what undoes it, or None.

    The default, "same_as_forward", traces them in the state in which the forward is called; it cannot be told from the
    same set by the user. What else the user has set is left.
    """
    global _backwards
    if _backwards is None:
        _backwards = _BackwardsSetting()
    if not _backwards.is_of_thread:
        return None
    before: object = _backwards.value.get()
    if before not in _backwards.defaults:
        return None
    compile_backwards_as("off")
    return before


@only_inlined
def compile_backwards_as(setting: object) -> None:
    """Undo `compile_backwards_without_autocast`, which has returned the setting."""
    known = _backwards
    known.value.set(setting)  # this and what follows is setattr on the module, which takes five times as long
    if not known.is_hash_outdated.get():
        known.is_hash_outdated.set(True)
    if known.outdated.get() is not None:
        known.settings._mark_get_dict_dirty(known.NAME)


def at_the_end_of_this_backward(function: Callable[[], None]) -> None:
    """Let autograd, which is running a hook, call a function when the backward is done."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


@only_inlined
def graph_nodes_made() -> int:
    """Return how many nodes of autograd graphs this thread has made: a forward makes some, no change by hand does."""
    return torch._C._autograd._get_sequence_nr()


@only_inlined
def is_backward_running() -> bool:
    """Say whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


@only_inlined
def graph_node_running() -> int | None:
    """Return which of the nodes that a thread has made a backward runs right now; None outside of a backward."""
    if not is_backward_running():
        return None
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def number_of_node(node: Any) -> int:
    """Return which of the nodes that a thread has made one of an autograd graph is."""
    number: int = node._sequence_nr()
    return number


def fsdp_mixed_precision(module: torch.nn.Module) -> Any:
    """Return the `MixedPrecisionPolicy` of a module that `fully_shard` has made a unit, or None."""
    state = getattr(module, "_get_fsdp_state", None)
    return None if state is None else state()._mp_policy


def holders_of(tensor: torch.Tensor) -> int:
    """Return how many tensors share a tensor's memory, plus a constant."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@only_inlined
def version(tensor: torch.Tensor) -> int:
    """Return a tensor's count of writes; tensors of inference mode keep none."""
    return 0 if tensor.is_inference() else tensor._version


def schema_of(op: Any, overload: str | None = None) -> Any:
    """Return what is known of an op's arguments and results; of an overload packet, what is of one overload.

    Of a higher-order operator, which takes functions, nothing is: None.
    """
    return getattr(op if overload is None else getattr(op, overload), "_schema", None)


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


@only_inlined
def _exporting_mode() -> Any:
    """Return the mode with which `torch.export` records what is not an op, or None outside of an export."""
    # The module is loaded by whoever exports; importing it here would slow down everybody else.
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxy_tensor is None:
        return None
    modes: list[Any] = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch's
    for mode in modes:
        if isinstance(mode, proxy_tensor.PreDispatchTorchFunctionMode):
            return mode
    return None


@only_inlined
def _record(name: str, args: tuple[object, ...]) -> None:
    mode = _exporting_mode()
    if mode is not None:
        # An exported program must run where castwise is not installed, so the node in its graph is torch's.
        mode.__torch_function__(getattr(torch.amp, name), (), args)


record_enter_autocast: Callable[[tuple[object, ...]], None] = functools.partial(_record, "_enter_autocast")
record_exit_autocast: Callable[[tuple[object, ...]], None] = functools.partial(_record, "_exit_autocast")


def backward_running() -> int | None:
    """Return a number of the backward that autograd runs in this thread, each its own; None outside. As of 2.13.0."""
    return torch._C._current_graph_task_id() if is_backward_running() else None


def leaf_running() -> torch.Tensor | None:
    """Return the leaf of the graph whose gradient a backward brings right now, if it does. As of 2.13.0."""
    node = torch._C._current_autograd_node() if is_backward_running() else None
    return getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None


@contextmanager
def no_post_accumulate_hooks(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Take off for a while what is called after gradients were added to parameters' own. As of 2.13.0."""
    # Autograd holds the very dicts: they are emptied, not replaced.
    hooks = [(dict(found), found) for param in params if (found := param._post_accumulate_grad_hooks)]
    try:
        for _, of_param in hooks:
            of_param.clear()
        yield
    finally:
        for before, of_param in hooks:
            of_param.update(before)


def is_compiled(module: Any) -> bool:
    """Say whether `torch.compile` wraps a module, or compiles its call or its forward (checked with torch 2.13.0)."""
    if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


def scaled_mm(a: torch.Tensor, b: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """Multiply matrices in an 8-bit float format, the second one column by column, into bf16. As of 2.13.0."""
    return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
