"""All private torch names that castwise uses, so that a new torch release is checked in one place.

Checked against torch 2.11 to 2.15 by `benchmarks/torch_versions.py`. Each name says what breaks without it; if a torch
release drops one, `import castwise` and plain training still work. Native ops (`torch._foreach_*`, `torch._amp_*`,
`torch.ops`) are called directly where they are needed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import get_ident
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from castwise._registered_hooks import without
from castwise._warnings import warn

__all__ = [
    "NEXT_INDEX",
    "REPLICATE",
    "SAVED",
    "SAVED_RAW",
    "SAVED_SHAPE",
    "TO_COPY",
    "UNSCALES_IN_STEP",
    "DataLoaderIterator",
    "PlainFunctions",
    "TorchDispatchMode",
    "after_tracing",
    "are_functorch_transforms_active",
    "at_the_end_of_this_backward",
    "backward_running",
    "backwards_have_state_around",
    "backwards_without_autocast",
    "buffers_in",
    "children_in",
    "compiled_methods",
    "compiler_of",
    "convert_tensors",
    "counted_version",
    "dispatch_modes",
    "fsdp_mixed_precision",
    "function_modes",
    "graph_node_running",
    "graph_nodes_made",
    "is_backward_running",
    "is_called_when_compiling",
    "is_compiled",
    "is_compiler_loaded",
    "is_default_device",
    "is_dynamo_active",
    "is_forward_recorded",
    "is_fsdp_flattened",
    "is_in_dispatch_mode",
    "is_jit_tracing",
    "is_torch_function_mode_enabled",
    "leaf_running",
    "lines_traced",
    "load_compiler",
    "never_traced",
    "no_gradient_hooks",
    "note_stepped",
    "number_of_node",
    "on_collective",
    "only_inlined",
    "parameters_in",
    "record_enter_autocast",
    "record_exit_autocast",
    "record_forward",
    "recorded_forward",
    "results_of_node",
    "run_while_tracing",
    "schema_of",
    "scripted_as",
    "stored_values",
    "tell_of_compilations",
    "tell_of_no_more_compilations",
    "tree_leaves",
    "tree_map",
    "unscales_in_step",
    "version",
    "without_dispatch_modes",
    "without_modes",
    "wraps_checkpoint",
    "wraps_compiled",
    "writes_to",
]


@functools.cache
def _warn_off(name: str, without: str) -> None:
    """Warn once that torch lacks a name, and of what goes without it."""
    warn(f"torch {torch.__version__} has no {name}: {without}", UserWarning)


def _find(module: str, name: str, otherwise: Any = None, without: str = "") -> Any:
    """Return an attribute or submodule of a torch module; if there is none, warn once, and return `otherwise`."""
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")
    except ImportError:
        if without:
            _warn_off(f"{module}.{name}", without)
        return otherwise


def _apply_to_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        inner = [_apply_to_leaves(function, each) for each in tree]
        return type(tree)(inner) if type(tree) in (list, tuple) else type(tree)(*inner)  # a named tuple
    if isinstance(tree, dict):
        return {key: _apply_to_leaves(function, each) for key, each in tree.items()}
    return function(tree)


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    _apply_to_leaves(found.append, tree)
    return found


_AS_LEAVES = "containers that are registered with torch count as one value"
tree_map: Callable[[Callable[[Any], Any], Any], Any] = _find(
    "torch.utils._pytree", "tree_map", _apply_to_leaves, _AS_LEAVES
)
tree_leaves: Callable[[Any], list[Any]] = _find("torch.utils._pytree", "tree_leaves", _leaves, _AS_LEAVES)

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:

    class _NoDispatchMode:
        """The fallback: `trace` and `diagnose` raise, and a `WeightCache` leaves training to autocast."""

        def __enter__(self) -> None:
            raise RuntimeError(
                f"torch {torch.__version__} has no torch.utils._python_dispatch.TorchDispatchMode, which this feature "
                "needs: use a release of torch that castwise supports"
            )

        def __exit__(self, *_: object) -> None:
            pass

    TorchDispatchMode = _find(
        "torch.utils._python_dispatch",
        "TorchDispatchMode",
        _NoDispatchMode,
        "castwise.trace and castwise.diagnose see no ops",
    )

# A context that hides ops from all dispatch modes. torch's yields the list of modes that it removes.
_SEE_CASTS = "dispatch modes see the casts of a WeightCache"
without_dispatch_modes: Callable[[], Any] = _find(
    "torch.utils._python_dispatch", "_disable_current_modes", nullcontext, _SEE_CASTS
)
# Returns True if a dispatch mode may be active in this thread.
is_in_dispatch_mode: Callable[[], bool] = _find(
    "torch.utils._python_dispatch", "is_in_torch_dispatch_mode", lambda: False, _SEE_CASTS
)

# A context in which functions treat subclass tensors as plain ones.
PlainFunctions: Any = _find(
    "torch", "DisableTorchFunctionSubclass", None, "gradients are not watched for misuse while they are scaled"
)

# `torch.func` transforms cast by rules of their own.
are_functorch_transforms_active: Callable[[], bool] = _find(
    "torch._C",
    "_are_functorch_transforms_active",
    lambda: False,
    "do not use a WeightCache under torch.func, which gets its copies",
)
_HAS_VERSIONS = hasattr(torch.Tensor, "_version")
if not _HAS_VERSIONS:
    _warn_off(
        "torch.Tensor._version",
        "changes to gradients after clipping are not detected, and a WeightCache keeps no casts",
    )
# A tensor's version counter; raises a RuntimeError for inference tensors. In C, because it is read for each gradient.
counted_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version") if _HAS_VERSIONS else lambda _: 0
# The same for weights. Without it, every read counts as a write.
writes_to = counted_version if _HAS_VERSIONS else functools.partial(lambda count, _: next(count), itertools.count())

# In C, because each region calls it. None has no `__torch_function__`, so the result depends on the modes alone.
is_torch_function_mode_enabled: Callable[[], bool] = functools.partial(torch.overrides.has_torch_function, (None,))

is_jit_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]  # public, but not exported

TO_COPY = torch.ops.aten._to_copy.default  # the op that `Tensor.to` runs

_Run = TypeVar("_Run", bound=Callable[..., object])


def run_while_tracing(function: _Run) -> _Run:
    """Mark a function without tensor arguments: Dynamo runs it while tracing and leaves it out of the graph.

    `torch.compiler.assume_constant_result` does the same but imports all of Dynamo. Without the mark, Dynamo breaks the
    graph where it cannot trace the function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a mark for torch
    return function


run_while_tracing(warn)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def only_inlined(function: _Function) -> _Function:
    """Keep Dynamo from compiling a function by itself, as it does with every call after a graph break.

    Inside a compiled function it is still traced.
    """
    _skip(function, "DEFAULT")
    return function


def never_traced(function: _Function) -> _Function:
    """Keep Dynamo from tracing a function and its callees; each call is a graph break.

    `torch.compiler.disable` does the same but imports all of Dynamo. Without the mark, Dynamo traces the function in
    others, and may fail.
    """
    _skip(function, "SKIP")
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # a mark for torch
    return function


_eval_frame = _find("torch._C._dynamo", "eval_frame")
_Action, _Strategy = getattr(_eval_frame, "_FrameAction", None), getattr(_eval_frame, "_FrameExecStrategy", None)


def _skip(function: Callable[..., Any], callees: str) -> None:
    # Without these names, Dynamo traces more than necessary, and breaks the graph where it fails.
    if _Action is not None and _Strategy is not None:
        _eval_frame.set_code_exec_strategy(function.__code__, _Strategy(_Action.SKIP, getattr(_Action, callees)))


class _ScriptName:
    """The attribute in which `torch.jit.script` looks for another name of a class, before it compiles the class."""

    def __init__(self, instead: type) -> None:
        self.instead = instead
        self.compiling_in: int | None = None

    def __get__(self, instance: object, owner: type) -> str:
        # A subclass that a user defines has code of its own, which the other class would leave out.
        if not owner.__module__.startswith("castwise."):
            raise AttributeError(f"{owner.__name__} has no other name in scripted code")
        if self.compiling_in != get_ident():  # after `install`, torch's class finds this one by its own name
            self.compiling_in = get_ident()
            try:
                # TorchScript compiles a class where it is the type of something; and only once.
                frontend: Any = torch.jit.frontend
                nowhere = frontend.make_source_context("", None, 0, 0, True).make_raw_range(0, 1)
                torch.jit.annotations.try_ann_to_type(self.instead, nowhere)  # type: ignore[no-untyped-call]  # torch's
            finally:
                self.compiling_in = None
        return f"__torch__.{self.instead.__module__}.{self.instead.__name__}"


_Class = TypeVar("_Class", bound=type)


def scripted_as(instead: type) -> Callable[[_Class], _Class]:
    """Have `torch.jit.script` compile another class wherever it meets the decorated one.

    TorchScript finds torch's regions by the name of their class. If torch drops the attribute for another name,
    TorchScript compiles the decorated class itself, and fails.
    """

    def decorate(cls: _Class) -> _Class:
        cls._jit_override_qualname = _ScriptName(instead)  # type: ignore[attr-defined]  # torch's name
        return cls

    return decorate


def _graph_traced() -> Any:
    """Return what Dynamo is tracing into a graph, or None if torch lacks the name."""
    translator = _find("torch._dynamo.symbolic_convert", "InstructionTranslator")
    current = getattr(translator, "current_tx", None)
    return None if current is None else current().output


def after_tracing(function: Callable[[], None]) -> None:
    """Have Dynamo call a function when the current trace ends or fails; the last one registered runs first."""
    register = getattr(_graph_traced(), "add_cleanup_hook", None)
    if register is None:
        name = "torch._dynamo's current_tx or add_cleanup_hook"
        _warn_off(name, "a region in compiled code is not undone if tracing stops inside it")
    else:
        register(function)


def lines_traced() -> list[tuple[str, int]]:
    """Return the file and line of each frame that Dynamo is tracing, innermost last; none if torch lacks the names."""
    context = getattr(_graph_traced(), "tracing_context", None)
    return [] if context is None else [(frame.filename, frame.lineno or 0) for frame in context.extract_stack()]


@only_inlined
def is_dynamo_active() -> bool:
    """Return True if Dynamo intercepts this thread's function calls to compile them."""
    asked = getattr(_eval_frame, "get_eval_frame_callback", None)
    return asked is not None and asked() is not None


def _compile_callbacks() -> tuple[list[Any], list[Any]]:
    """Return the callbacks that Dynamo runs before and after it compiles; empty lists if it is not loaded."""
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    return getattr(handler, "start_callbacks", []), getattr(handler, "end_callbacks", [])


def is_called_when_compiling(function: Callable[..., None]) -> bool:
    """Return True if Dynamo calls a function before each compilation."""
    return function in _compile_callbacks()[0]


def tell_of_compilations(*functions: Callable[..., None]) -> None:
    """Have Dynamo, if it is loaded, call one function before and one after each compilation."""
    for callbacks, function in zip(_compile_callbacks(), functions, strict=True):
        if function not in callbacks:
            callbacks.append(function)


def tell_of_no_more_compilations(*functions: Callable[..., None]) -> None:
    """Undo `tell_of_compilations`."""
    for callbacks, function in zip(_compile_callbacks(), functions, strict=True):
        if function in callbacks:
            callbacks.remove(function)


def is_compiler_loaded() -> bool:
    """Return True if Dynamo is loaded, without which nothing is compiled."""
    return "torch._dynamo" in sys.modules


def load_compiler() -> None:
    """Load Dynamo together with its table of rules for torch's classes and functions."""
    rules = _find("torch._dynamo.trace_rules", "get_torch_obj_rule_map")
    if rules is not None:
        rules()


@only_inlined
def backwards_without_autocast() -> Any:
    """Return a context manager in which this thread compiles backwards to run outside autocast; None if none is needed.

    A user's own setting is kept, unless it equals torch's default: the two cannot be distinguished. Without the module,
    compiled backwards of a policy's inner regions run in the outer one's state.
    """
    # Before torch 2.13 the setting is shared by all threads.
    if torch.__version__ < "2.13" or not backwards_have_state_around():
        return None
    return _find("torch._functorch", "config").patch(backward_pass_autocast="off")


@only_inlined
def backwards_have_state_around() -> bool:
    """Return True if compiled backwards run in the autocast state around the compiled function, torch's default."""
    config = _find("torch._functorch", "config")
    return getattr(config, "backward_pass_autocast", None) == "same_as_forward"


def at_the_end_of_this_backward(function: Callable[[], None]) -> None:
    """From a hook, have autograd call a function at the end of the current backward."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        _warn_off("torch.autograd.Variable._execution_engine", "some mistakes around a backward are not found")
    else:
        engine.queue_callback(function)


_AS_NEW = "backwards are not detected, and a forward that a checkpoint recomputes counts as a new one"
_nodes_made: Callable[[], int] = _find("torch.autograd", "_get_sequence_nr", lambda: 0, _AS_NEW)
_backward: Callable[[], int] = _find("torch._C", "_current_graph_task_id", lambda: -1, _AS_NEW)
_node: Callable[[], Any] = _find("torch._C", "_current_autograd_node", lambda: None, _AS_NEW)


@only_inlined
def graph_nodes_made() -> int:
    """Return how many autograd nodes this thread has created: a forward creates some, a manual change creates none."""
    return _nodes_made()


@only_inlined
def is_backward_running() -> bool:
    """Return True if autograd is running a backward in this thread."""
    return _backward() != -1


def backward_running() -> int | None:
    """Return the unique number of the backward running in this thread; None if there is none."""
    return _backward() if is_backward_running() else None


@only_inlined
def graph_node_running() -> int | None:
    """Return the number (see `number_of_node`) of the node that a backward is running; None outside a backward."""
    node = _node() if is_backward_running() else None
    return None if node is None else number_of_node(node)


def leaf_running() -> torch.Tensor | None:
    """Return the leaf whose gradient the backward is accumulating, or None."""
    node = _node() if is_backward_running() else None
    return getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None


# What begins the names of what an autograd node has saved, and ends those of shapes. Without them, an op of the loss is
# named only if it can be repeated from its own arguments.
SAVED, SAVED_SHAPE = "_saved_", "_sym_sizes"
SAVED_RAW = "_raw_saved_"  # what holds a saved tensor, and its hooks. Without it, checkpointed functions run again


@only_inlined
def number_of_node(node: Any) -> int:
    """Return an autograd node's number, which counts the nodes that its thread creates; 0 if torch lacks the name."""
    number: int = getattr(node, "_sequence_nr", lambda: 0)()
    return number


def results_of_node(node: Any) -> list[tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of what the op of an autograd node has returned; empty if torch lacks the name.

    Without it, the losses of fewer scripts are repeated where a spike is suspected.
    """
    return [(torch.Size(result.shape), result.dtype) for result in getattr(node, "_input_metadata", ())]


def fsdp_mixed_precision(module: torch.nn.Module) -> Any:
    """Return the `MixedPrecisionPolicy` of a module that `fully_shard` was applied to, or None.

    Without the name, a policy that contradicts FSDP2's is not refused.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # a program that shards a module has imported it
    is_sharded = isinstance(module, getattr(fsdp, "FSDPModule", ()))
    return getattr(fsdp.fully_shard.state(module), "_mp_policy", None) if is_sharded else None


@only_inlined
def version(tensor: torch.Tensor) -> int:
    """Return a tensor's version counter; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else counted_version(tensor)


def schema_of(op: Any, overload: str | None = None) -> Any:
    """Return the schema of an op, or of one overload of an overload packet.

    Higher-order operators, whose arguments are functions, have none: None. If torch lacks the name, no op has one.
    """
    return getattr(op if overload is None else getattr(op, overload), "_schema", None)


def stored_values(sparse: torch.Tensor) -> torch.Tensor:
    """Return the stored values of a sparse COO tensor, coalesced or not; they share its memory."""
    values: torch.Tensor = torch.ops.aten._values(sparse)
    return values


# The live tables of a module, with entries that are None. In C, because a `WeightCache` reads them in each region.
# Without them, policies, `WeightCache`, `diagnose`, `compare` and `trace` fail: torch's own iterators skip None, which
# a forward may replace by a tensor, and take several times as long.
parameters_in: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]] = operator.attrgetter("_parameters")
buffers_in: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = operator.attrgetter("_buffers")
children_in: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]] = operator.attrgetter("_modules")


def convert_tensors(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Convert a module's tensors and their gradients in place, as `nn.Module.to` does.

    Without it, nothing is converted. FSDP2 overrides it to take note of new tensors.
    """
    if hasattr(module, "_apply"):
        module._apply(function)  # type: ignore[no-untyped-call]  # torch's


# The method that `nn.DataParallel` calls to copy a module to a device. Without it, replicas would get the forward that
# a `WeightCache` has put on the module, with the weights of another device.
REPLICATE = "_replicate_for_data_parallel"

# The attribute that tells a scaler that an optimizer's `step` unscales. Without it, the gradients of fused optimizers
# are unscaled before, in one more pass.
UNSCALES_IN_STEP = "_step_supports_amp_scaling"


def unscales_in_step(cls: _Class) -> _Class:
    """Let scalers leave the unscaling to an optimizer's `step`."""
    setattr(cls, UNSCALES_IN_STEP, True)
    return cls


def note_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer as stepped, for learning-rate schedulers that have patched its `step`, which is not called.

    Without torch's name, they warn that the optimizer has not stepped.
    """
    if "step" in vars(optimizer):
        optimizer._opt_called = True  # type: ignore[attr-defined]  # the schedulers' flag


def record_forward(ctx: Any, enabled: bool, dtype: torch.dtype) -> None:
    """Record on the context of a `torch.autograd.Function` in which autocast state its forward ran.

    Without torch's names, castwise's `custom_fwd` does not go with torch's `custom_bwd`, nor torch's with castwise's.
    """
    ctx._dtype, ctx._fwd_used_autocast = dtype, enabled


def is_forward_recorded(ctx: Any) -> bool:
    """Return True if castwise's or torch's `custom_fwd` has recorded the state of a forward."""
    return hasattr(ctx, "_fwd_used_autocast")


def recorded_forward(ctx: Any) -> tuple[bool, torch.dtype]:
    """Return what `record_forward` has recorded; raise torch's AttributeError if there is nothing."""
    return ctx._fwd_used_autocast, ctx._dtype


def is_fsdp_flattened(param: torch.Tensor) -> bool:
    """Return True if FullyShardedDataParallel manages a parameter, which then holds this rank's part.

    Without the name, norms, records and `MasterWeights` take such a part for the whole parameter.
    """
    return getattr(param, "_fsdp_flattened", False)


_function_modes: Callable[[], list[Any]] = _find(
    "torch.overrides", "_get_current_function_mode_stack", list, "function modes also see castwise's own ops"
)


@only_inlined
def function_modes() -> list[Any]:
    """Return the active `TorchFunctionMode`s of this thread, innermost last."""
    return _function_modes()


def is_default_device(mode: Any) -> bool:
    """Return True for the `TorchFunctionMode` of `torch.device(...)` and `torch.set_default_device`."""
    return type(mode).__module__.startswith("torch.") and isinstance(getattr(mode, "device", None), torch.device)


@contextmanager
def without_modes() -> Iterator[None]:
    """Hide ops and calls from the modes of the script, which may count them, change them or draw random numbers.

    Modes of torch itself, such as the one of fake tensors, and the default device stay.
    """
    hidden: list[TorchFunctionMode] = []
    with ExitStack() as stack:
        if is_in_dispatch_mode():
            for mode in reversed(stack.enter_context(without_dispatch_modes()) or ()):
                if getattr(mode, "is_infra_mode", bool)():
                    stack.enter_context(mode)
        try:
            for mode in reversed(function_modes()):
                if is_default_device(mode):  # torch keeps it below all others
                    break
                TorchFunctionMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]  # torch's
                hidden.append(mode)  # by the methods of the base class: the mode's own may do more
            yield
        finally:
            for mode in reversed(hidden):
                TorchFunctionMode.__enter__(mode)  # type: ignore[no-untyped-call]  # torch's


_WITHOUT_REGIONS = "exported programs run without the regions of castwise"


@only_inlined
def _exporting_mode() -> Any:
    """Return the mode with which `torch.export` records calls that are not ops; None outside an export."""
    # An export has already loaded the module; importing it here would slow down every other program.
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxy_tensor is None:
        return None
    recorder = getattr(proxy_tensor, "PreDispatchTorchFunctionMode", None)
    if recorder is None:
        _warn_off("PreDispatchTorchFunctionMode", _WITHOUT_REGIONS)
        return None
    for mode in function_modes():  # no generator, which Dynamo would trace as a function of its own
        if isinstance(mode, recorder):
            return mode
    return None


@only_inlined
def _record(name: str, args: tuple[object, ...]) -> Any:
    """Return the new node of the graph; None outside an export, and if torch lacks one of the names."""
    mode = _exporting_mode()
    if mode is None:
        return None
    # An exported program must run without castwise, so its graph gets torch's own node.
    functions = {each: getattr(torch.amp, each, None) for each in ("_enter_autocast", "_exit_autocast")}
    for each, function in functions.items():
        if function is None:  # one without the other would not be a region
            _warn_off(f"torch.amp.{each}", _WITHOUT_REGIONS)
            return None
    return mode.__torch_function__(functions[name], (), args)


record_enter_autocast: Callable[[tuple[object, ...]], Any] = functools.partial(_record, "_enter_autocast")
record_exit_autocast: Callable[[tuple[object, ...]], Any] = functools.partial(_record, "_exit_autocast")


def no_gradient_hooks(params: Iterable[torch.Tensor], *, only_after: bool) -> AbstractContextManager[None]:
    """Remove the hooks of the parameters' gradients during a block, or only those after they are accumulated.

    Without the names, hooks of the script are called while a batch is replayed, among them those in which an optimizer
    steps. (A hook that is registered to find the others, as `hooks_of` does, would leave an empty table at each
    parameter.)
    """
    names = ["_post_accumulate_grad_hooks", *([] if only_after else ["_backward_hooks"])]
    return without(found for param in params for name in names if (found := getattr(param, name, None)))


def wraps_compiled(module: Any) -> bool:
    """Return True if `module` is a wrapper that `torch.compile` returned."""
    return "get_compiler_config" in vars(module)


def compiler_of(compiled: Any) -> Callable[[Any], Any] | None:
    """Return what compiles other code as a compiled model or function was; None for what `torch.compile` did not make.

    Compiled functions do not tell their settings: these are the default ones.
    """
    if isinstance(compiled, torch.nn.Module) and wraps_compiled(compiled):
        return getattr(compiled, "dynamo_ctx", torch.compile)  # the context that wrapped it
    return torch.compile if hasattr(compiled, "get_compiler_config") else None


def wraps_checkpoint(module: torch.nn.Module) -> bool:
    """Return True for the wrapper of a module that torch checkpoints or offloads; the module is its only child.

    Without the class, names in a policy must have the wrapper's part.
    """
    return any(
        cls.__name__ == "ActivationWrapper" and cls.__module__.startswith("torch.") for cls in type(module).__mro__
    )


def is_compiled(module: torch.nn.Module) -> bool:
    """Return True if `torch.compile` wraps a module, or compiles its forward or another of its methods."""
    forward = vars(module).get("forward")
    return (
        wraps_compiled(module)
        or hasattr(getattr(forward, "before", forward), "get_compiler_config")  # a policy may have wrapped it
        or bool(compiled_methods(module))
    )


def compiled_methods(module: torch.nn.Module) -> list[str]:
    """Return the names of attributes with compiled methods of a module, of which `module.compile()` makes one."""
    return [name for name, value in vars(module).items() if _is_compiled_method(value, module)]


def _is_compiled_method(value: Any, module: torch.nn.Module) -> bool:
    if type(value) is not FunctionType or not hasattr(value, "get_compiler_config"):
        return False
    # torch 2.15 compiles a wrapper of the method.
    method = inspect.unwrap(value, stop=lambda wrapper: hasattr(wrapper, "__self__"))
    return getattr(method, "__self__", None) is module


def dispatch_modes() -> list[Any]:
    """Return the active `TorchDispatchMode`s of this thread."""
    if not is_in_dispatch_mode():
        return []
    with without_dispatch_modes() as modes:
        return [*(modes or ())]


# Collectives that write to their first argument: a tensor, or tensors in lists. For some of them torch bumps the
# version counter, but given `param.data`, only the alias's.
_WRITING_COLLECTIVES = (
    *("broadcast_", "allreduce_", "reduce_", "recv_", "recv_any_source_", "scatter_", "alltoall_", "alltoall_base_"),
    *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "gather_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "allreduce_coalesced_"),
)
_kernels: list[Any] = []  # libraries, kept alive: a library that is freed unregisters its kernels


def on_collective(function: Callable[[Iterable[torch.Tensor]], object]) -> None:
    """Register a function to be called with the tensors that a collective is about to write to.

    It is never called if torch lacks torch.distributed.
    """
    level = getattr(torch.DispatchKey, "ADInplaceOrView", None)
    if level is None:
        name = "torch.DispatchKey.ADInplaceOrView"
        _warn_off(name, "call WeightCache.invalidate() after collectives that write to the `.data` of weights")
        return

    def kernel(op: Any, keys: Any, written: Any, *args: Any, **kwargs: Any) -> Any:
        function(tree_leaves(written))
        while keys.has(level):
            keys = keys.remove(keys.highestPriorityTypeId())
        return op.redispatch(keys, written, *args, **kwargs)

    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]  # torch's
    for op in (getattr(torch.ops.c10d, name).default for name in _WRITING_COLLECTIVES if hasattr(torch.ops.c10d, name)):
        name = op.name().partition("::")[2]
        library.impl(name, functools.partial(kernel, op), "ADInplaceOrView", with_keyset=True)
    _kernels.append(library)


# What iterates over a `DataLoader`, and its method that draws the indices of a batch.
DataLoaderIterator: Any = _find(
    "torch.utils.data.dataloader",
    "_BaseDataLoaderIter",
    object,
    "a diagnosis names the sample of a batch and not its index in the dataset",
)
NEXT_INDEX = "_next_index"


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of a collective that may still run, and any other tensor as it is.

    Without the name, what tensor parallelism returns has no ranges in a diagnosis.
    """
    result: torch.Tensor = getattr(tensor, "trigger_wait", lambda: tensor)()
    return result
