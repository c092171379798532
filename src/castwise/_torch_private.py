"""Every private torch name that castwise reaches, in one place, so that a new torch release is checked in one place.

Checked against torch 2.13.0 and the 2.11 sources. `torch._foreach_*` and `torch._amp_*` are native ops,
used where they are needed and not repeated here.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._C import DisableTorchFunctionSubclass as PlainFunctions
from torch._C import _are_functorch_transforms_active as are_functorch_transforms_active
from torch._C import _get_privateuse1_backend_name as privateuse1_backend_name
from torch._C import _is_torch_function_mode_enabled as is_torch_function_mode_enabled
from torch._C import _is_tracing as is_jit_tracing
from torch._C._dynamo import eval_frame
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "TO_COPY",
    "PlainFunctions",
    "TorchDispatchMode",
    "after_tracing",
    "are_functorch_transforms_active",
    "at_the_end_of_this_backward",
    "backward_running",
    "backwards_without_autocast",
    "counted_version",
    "device_types_of",
    "dispatch_modes",
    "fsdp_mixed_precision",
    "function_modes",
    "graph_node_running",
    "graph_nodes_made",
    "is_backward_running",
    "is_compiled",
    "is_default_device",
    "is_dynamo_active",
    "is_fsdp_flattened",
    "is_gathered_by_fsdp",
    "is_jit_tracing",
    "is_torch_function_mode_enabled",
    "leaf_running",
    "lines_traced",
    "load_compiler",
    "never_traced",
    "no_post_accumulate_hooks",
    "number_of_node",
    "on_collective",
    "only_inlined",
    "privateuse1_backend_name",
    "record_enter_autocast",
    "record_exit_autocast",
    "run_while_tracing",
    "scaled_mm",
    "schema_of",
    "stored_values",
    "tell_of_compilations",
    "tell_of_no_more_compilations",
    "tree_leaves",
    "tree_map",
    "version",
    "without_dispatch_modes",
    "writes_to",
]


# How often a tensor was written to; a RuntimeError for one of inference mode. In C, as it is asked of each gradient.
counted_version = operator.attrgetter("_version")

TO_COPY = torch.ops.aten._to_copy.default  # what `Tensor.to` comes down to

_Run = TypeVar("_Run", bound=Callable[..., object])


def run_while_tracing(function: _Run) -> _Run:
    """Mark a function without tensors that Dynamo shall run when it meets a call of it, and leave out of the graph.

    `torch.compiler.assume_constant_result` does the same but imports all of Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a mark for torch
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
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # a mark for torch
    return function


def _skip(function: Callable[..., Any], callees: eval_frame._FrameAction) -> None:
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, callees)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def after_tracing(function: Callable[[], None]) -> None:
    """Let Dynamo, which is tracing, call a function when it ends or gives up; the last one comes first."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    InstructionTranslator.current_tx().output.add_cleanup_hook(function)


def lines_traced() -> list[tuple[str, int]]:
    """Return file and line of what Dynamo, which is tracing, is about to call, the innermost last. As of 2.13.0."""
    from torch._guards import TracingContext

    return [(frame.filename, frame.lineno or 0) for frame in TracingContext.extract_stack()]


@only_inlined
def is_dynamo_active() -> bool:
    """Return True if Dynamo looks at each function that this thread calls, to compile it. As of 2.13.0."""
    asked = getattr(eval_frame, "get_eval_frame_callback", None)
    return asked is not None and asked() is not None


def _compile_callbacks() -> tuple[list[Any], list[Any]]:
    """Return what Dynamo calls when it begins to compile and when it ends; without it, empty lists."""
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    return getattr(handler, "start_callbacks", []), getattr(handler, "end_callbacks", [])


def tell_of_compilations(*functions: Callable[..., None]) -> None:
    """Have Dynamo, if it is loaded, call one function before it compiles anything, and one after. As of 2.13.0."""
    for callbacks, function in zip(_compile_callbacks(), functions, strict=True):
        if function not in callbacks:
            callbacks.append(function)


def tell_of_no_more_compilations(*functions: Callable[..., None]) -> None:
    """Undo `tell_of_compilations`."""
    for callbacks, function in zip(_compile_callbacks(), functions, strict=True):
        if function in callbacks:
            callbacks.remove(function)


def load_compiler() -> None:
    """Load Dynamo, and have it look up by name the classes and functions of torch that it treats by themselves."""
    from torch._dynamo import trace_rules

    trace_rules.get_torch_obj_rule_map()


@only_inlined
def backwards_without_autocast() -> Any:
    """Return a context manager in which this thread compiles backwards to run outside of autocast; None to leave it.

    torch's default is not told from the same value set by the user. Any other setting of the user's is kept.
    """
    from torch._functorch import config

    # Before torch 2.13 a setting is one for all threads. As of 2.13.0 the name exists in both.
    if torch.__version__ < "2.13" or config.backward_pass_autocast != "same_as_forward":
        return None
    return config.patch(backward_pass_autocast="off")


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


@only_inlined
def version(tensor: torch.Tensor) -> int:
    """Return a tensor's count of writes; tensors of inference mode keep none."""
    return 0 if tensor.is_inference() else tensor._version


# As `version`, for the hot path: a tensor of inference mode raises.
writes_to: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


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
def function_modes() -> list[Any]:
    """Return the `TorchFunctionMode`s that are active in this thread, the innermost last. As of 2.13.0."""
    modes: list[Any] = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch's
    return modes


def is_default_device(mode: Any) -> bool:
    """Return True for the `TorchFunctionMode` of `torch.device(...)` and `torch.set_default_device`. As of 2.13.0."""
    return type(mode).__module__ == "torch.utils._device"  # which is loaded by whoever uses it


@only_inlined
def _exporting_mode() -> Any:
    """Return the mode with which `torch.export` records what is not an op, or None outside of an export."""
    # The module is loaded by whoever exports; importing it here would slow down everybody else.
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxy_tensor is None:
        return None
    for mode in function_modes():
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
    forward = vars(module).get("forward")
    return hasattr(getattr(forward, "before", forward), "_torchdynamo_orig_callable")  # a policy may have wrapped it


def scaled_mm(a: torch.Tensor, b: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """Multiply matrices in an 8-bit float format, the second one column by column, into bf16. As of 2.13.0."""
    return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def dispatch_modes() -> list[Any]:
    """Return the `TorchDispatchMode`s that see the ops of this thread. As of 2.13.0."""
    return _get_current_dispatch_mode_stack()


# Collectives that write to their first argument without bumping versions, which torch 2.13 does in all others.
_WRITING_COLLECTIVES = (
    *("broadcast_", "allreduce_", "reduce_", "recv_", "recv_any_source_", "scatter_", "alltoall_", "alltoall_base_"),
)
_kernels: list[Any] = []  # which take what is registered away when they die


def on_collective(function: Callable[[Iterable[torch.Tensor]], object]) -> None:
    """Have a function called with the tensors that a collective is about to write to without bumping their versions.

    Without the private names, or torch.distributed, nothing is called. As of 2.13.0.
    """
    below = getattr(torch._C, "_after_ADInplaceOrView_keyset", None)
    ops = torch.ops.c10d
    if below is None or not all(hasattr(ops, name) for name in _WRITING_COLLECTIVES):
        return

    def kernel(op: Any, keys: Any, written: Any, *args: Any, **kwargs: Any) -> Any:
        function([written] if isinstance(written, torch.Tensor) else written)
        return op.redispatch(keys & below, written, *args, **kwargs)

    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]  # torch's
    for name in _WRITING_COLLECTIVES:
        op = getattr(ops, name).default
        library.impl(name, functools.partial(kernel, op), "ADInplaceOrView", with_keyset=True)
    _kernels.append(library)
