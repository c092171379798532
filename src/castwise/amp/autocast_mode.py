"""`autocast`: a region of code in which ops run in a lower precision, and decorators for custom autograd Functions.

torch's native dispatch decides which op runs in which dtype. A region sets the thread's four autocast switches
(enabled, dtype, cache, nesting) on entry and restores them on exit. Two requirements shaped the code:

* An object may be entered again while it is active, and by several threads at once (decorated functions are), so the
  state to restore is kept per thread and per entry, never in a plain attribute.
* `torch.compile` traces a region created inside the compiled function line by line. Of a region created outside, it
  reads only `device`, `fast_dtype`, `_enabled` and `_cache_enabled`, so these names are an interface.

Policies and weight caches are extensions of a region, which only enters and leaves them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from threading import get_ident
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import (
    autocast_decrement_nesting,
    autocast_increment_nesting,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
    set_autocast_cache_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
)
from torch.amp import autocast_mode as torchs
from torch.compiler import is_dynamo_compiling
from typing_extensions import Self

from castwise._torch_private import (
    is_forward_recorded,
    is_torch_function_mode_enabled,
    only_inlined,
    record_enter_autocast,
    record_exit_autocast,
    recorded_forward,
    run_while_tracing,
    scripted_as,
)
from castwise.amp import _emulation as emulation
from castwise.amp import _torch_words as torch_words
from castwise.amp import _traced_region
from castwise.amp._custom_function import SeparateContexts, record_autocast
from castwise.amp._custom_function import _cast as _cast  # torch has it here
from castwise.amp._devices import can_autocast_to, has_autocast, is_autocast_available
from castwise.amp._observers import OBSERVERS
from castwise.amp._thread_state import THREAD

__all__ = ["autocast", "autocast_decorator", "custom_bwd", "custom_fwd", "is_autocast_available"]

_F = TypeVar("_F", bound=Callable[..., Any])


class Extension(Protocol):
    """A feature of a region that torch's does not have."""

    def enter(self, region: autocast) -> Any:
        """Begin in the thread that enters the region, once its switches are set; return the token for `leave`."""

    def leave(self, token: Any) -> None:
        """End, before the switches are restored. Must not raise."""


class WeightCacheLike(Extension, Protocol):
    """What a region needs of a `castwise.WeightCache`."""

    def invalidate(self) -> None:
        """Forget all casts."""


class BoundPolicyLike(Extension, Protocol):
    """What a region needs of a `castwise.policy.BoundPolicy`."""

    @property
    def policy(self) -> Any:
        """The policy, which names the dtype it computes in as `compute`."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that the region casts to; None if only rules cast."""

    @property
    def low_precisions(self) -> Collection[torch.dtype]:
        """All dtypes below fp32 that it casts to."""

    @property
    def recipes(self) -> Collection[Any]:
        """The recipes of its modules."""

    def check_is_bound(self) -> None:
        """Raise RuntimeError if it has been unbound."""

    def cast_output(self, value: Any, device: str) -> Any:
        """Cast what a decorated function returns."""


class _Entry:
    """The state that one entry of a region restores in its thread."""

    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool
    before: _Entry | None = None  # an entry of the same region that is still active
    policy_state: Any = None  # of the enclosing region
    extensions: tuple[tuple[Extension, Any], ...] = ()  # each with its token


def autocast_decorator(autocast_instance: autocast, func: _F) -> _F:
    """Wrap `func` so that each of its calls runs inside the region `autocast_instance`."""

    policy: BoundPolicyLike | None = getattr(autocast_instance, "_policy", None)

    @functools.wraps(func)
    def decorate_autocast(*args: Any, **kwargs: Any) -> Any:
        with autocast_instance:
            result = func(*args, **kwargs)
            return result if policy is None else policy.cast_output(result, autocast_instance.device)

    vars(decorate_autocast).update(torch_words.MARKS)
    return decorate_autocast  # type: ignore[return-value]  # wraps() keeps the signature


@scripted_as(torch.autocast)
class autocast(torch.autocast):  # noqa: N801  # torch's name
    """Run the ops of a region in a lower precision, chosen op by op; a context manager and a decorator.

    Matrix products and convolutions run in `dtype`, ops that need range or precision in fp32, and all others in the
    dtype of their inputs, according to torch's own lists. Put the forward and the loss in the region; the backward
    runs outside, in the dtypes that the forward chose. Entering and leaving does not sync with the device.

    The state is thread-local: a new thread starts outside any region. Regions nest in any combination of devices,
    dtypes and `enabled=False`, and a region may be nested in itself.

    Args:
        device_type: `"cuda"`, `"cpu"`, `"xpu"`, ...: the `type` of the tensors' device.
        dtype: The low precision, `torch.float16` or `torch.bfloat16`; None uses torch's default for the device
            (`torch.get_autocast_dtype`).
        enabled: False disables autocast in the region.
        cache_enabled: Keep each fp32 weight's cast until the outermost region ends; None uses the thread's setting.
        weight_cache: Keep casts of a model's weights beyond the region, until the weights change; see `WeightCache`.
        policy: Sets the dtypes of modules and ops, instead of `dtype`; see `Policy`. A nested region suspends it; a
            nested `torch.autocast` does so if it changes the dtype or whether autocast is enabled.

    Raises:
        ValueError: `device_type` is not a string, or `dtype` is given with a policy.
        TypeError: `dtype` is not a `torch.dtype`, a flag is not a bool, or the policy is not bound to a model.
        RuntimeError: torch has no autocast for the device, or the GPU does not support bfloat16.

    Warns:
        UserWarning: The device is missing or does not support autocast to `dtype`, so the region is disabled. Or, once
            per process and dtype, the CPU has no units for `dtype` and emulates it slowly.

    Example:
        >>> linear = torch.nn.Linear(4, 4)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     linear(torch.ones(1, 4)).dtype
        torch.bfloat16
    """

    _policy: BoundPolicyLike | None = None
    _extensions: tuple[Extension, ...] = ()

    @only_inlined
    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        weight_cache: WeightCacheLike | None = None,
        policy: BoundPolicyLike | None = None,
    ) -> None:
        if not isinstance(device_type, str):
            raise _no_device_type(device_type)
        if not has_autocast(device_type):
            raise _no_autocast(device_type, dtype)
        self.device = device_type
        if policy is not None:
            dtype = _dtype_of(policy, dtype)
        self.fast_dtype = get_autocast_dtype(device_type) if dtype is None else dtype
        if not isinstance(self.fast_dtype, torch.dtype):
            raise _no_dtype(device_type, dtype)
        is_on = bool(enabled) and can_autocast_to(device_type, self.fast_dtype)
        # Flags are checked here, because torch's setters would reject them in a region that is half entered. As in
        # torch, a region that is disabled for another reason takes any true flag.
        if enabled is not True and enabled is not False and (is_on or not enabled):
            raise _no_flag(device_type, enabled)
        if cache_enabled is None:
            cache_enabled = is_autocast_cache_enabled()
        elif cache_enabled is not True and cache_enabled is not False:
            raise _no_cache_flag(cache_enabled)
        if weight_cache is not None and not hasattr(weight_cache, "invalidate"):
            raise TypeError(f"weight_cache must be a castwise.WeightCache or None, got {type(weight_cache).__name__}")
        self._caches = cache_enabled
        self._enabled = is_on
        if policy is not None or weight_cache is not None:
            self._extend(policy, weight_cache)
        if device_type == "cpu" and (self._enabled or self._policy is not None):
            lows: Collection[torch.dtype] = (self.fast_dtype,) if self._policy is None else self._policy.low_precisions
            for low in lows:
                # Dynamo would guard on the set of past warnings, and recompile after each warning.
                if is_dynamo_compiling() or low not in emulation.SETTLED:
                    emulation.warn_if_emulated(low)
        self._entries: dict[int, _Entry] = {}  # by thread

    @only_inlined
    def _extend(self, policy: BoundPolicyLike | None, weight_cache: WeightCacheLike | None) -> None:
        """Give an enabled region a policy and a weight cache, before it is entered."""
        if not self._enabled:
            return
        if policy is not None:
            if all(can_autocast_to(self.device, low) for low in policy.low_precisions):
                self._policy, self.fast_dtype = policy, policy.dtype or self.fast_dtype
            self._enabled = self._policy is not None and policy.dtype is not None
        of_policy = self._policy
        has_casts = self._enabled if of_policy is None else bool(of_policy.low_precisions or of_policy.recipes)
        self._extensions = (weight_cache,) if weight_cache is not None and has_casts else ()
        if of_policy is not None:
            self._extensions += (of_policy,)

    @property
    def _cache_enabled(self) -> bool:  # torch's is an attribute
        """The setting, for Dynamo when it enters a region created outside the compiled function, and for extensions.

        Dynamo reads only this and three more attributes, so it would ignore the policy. Extensions read it while the
        region is active.
        """
        if self._policy is not None and not self._entries:
            raise RuntimeError(
                "a compiled function enters a region with a policy that was created outside the function: "
                "create the region inside the function, or enter it outside"
            )
        return self._caches

    @_cache_enabled.setter
    def _cache_enabled(self, value: bool) -> None:
        if value is not True and value is not False:
            raise _no_cache_flag(value)
        self._caches = value

    @only_inlined
    def __enter__(self) -> Self:
        if is_dynamo_compiling():
            return self._enter_compiled()
        device, thread = self.device, get_ident()
        entry = _Entry()
        entry.enabled = is_autocast_enabled(device)
        entry.dtype = get_autocast_dtype(device)
        entry.cache_enabled = is_autocast_cache_enabled()
        if thread in self._entries:
            entry.before = self._entries[thread]
        self._entries[thread] = entry
        set_autocast_enabled(device, self._enabled)
        set_autocast_dtype(device, self.fast_dtype)
        autocast_increment_nesting()
        set_autocast_cache_enabled(self._caches)
        if is_torch_function_mode_enabled():
            record_enter_autocast((device, self.fast_dtype, self._enabled, self._caches))
        for observer in OBSERVERS:
            observer.entered(self)
        if THREAD.state is not None:  # a region suspends the policy of the enclosing one
            entry.policy_state, THREAD.state = THREAD.state, None
        if self._extensions:
            try:
                for extension in self._extensions:
                    entry.extensions += ((extension, extension.enter(self)),)
            except BaseException:
                self.__exit__(None, None, None)
                raise
        return self

    @only_inlined
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> bool | None:
        if is_dynamo_compiling():
            return self._leave_compiled()
        device, thread = self.device, get_ident()
        entry = self._entries.pop(thread, None)
        if entry is None:
            # This thread has closed a generator of another thread, so there is nothing to restore in this one.
            if not self._entries:
                raise RuntimeError("this autocast region was exited without being entered")
            return False
        for extension, token in reversed(entry.extensions):
            extension.leave(token)
        if entry.policy_state is not None:
            THREAD.state = entry.policy_state
        if entry.before is not None:
            self._entries[thread] = entry.before
        if autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()  # by its name, which tests replace
        set_autocast_enabled(device, entry.enabled)
        set_autocast_dtype(device, entry.dtype)
        set_autocast_cache_enabled(entry.cache_enabled)
        if is_torch_function_mode_enabled():
            record_exit_autocast(())
        for observer in OBSERVERS:
            observer.left(self)
        return False

    @only_inlined
    def _enter_compiled(self) -> Self:
        """Enter while Dynamo traces: the switches become nodes of the graph, and a weight cache is ignored."""
        device = self.device
        entry = _Entry()
        entry.enabled = is_autocast_enabled(device)
        entry.dtype = get_autocast_dtype(device)
        entry.cache_enabled = is_autocast_cache_enabled()
        if _TRACING in self._entries:
            entry.before = self._entries[_TRACING]
        self._entries[_TRACING] = entry
        _traced_region.tell_observers(device, self._enabled)
        _traced_region.prepare(device)
        _traced_region.enter(device, self._enabled, self.fast_dtype, self._caches)
        if THREAD.state is not None:
            entry.policy_state, THREAD.state = THREAD.state, None
        if self._policy is not None:
            entry.extensions = ((self._policy, self._policy.enter(self)),)
        return self

    @only_inlined
    def _leave_compiled(self) -> bool:
        entry = self._entries.pop(_TRACING)
        for extension, token in entry.extensions:
            extension.leave(token)
        if entry.policy_state is not None:
            THREAD.state = entry.policy_state
        if entry.before is not None:
            self._entries[_TRACING] = entry.before
        _traced_region.leave(self.device, entry.enabled, entry.dtype, entry.cache_enabled)
        return False

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_entries" not in state:  # of an object of torch's class, which a script has pickled before
            autocast.__init__(self, state["device"], state["fast_dtype"], state["_enabled"], state["_cache_enabled"])
        else:
            self.__dict__.update(state)

    def __call__(self, func: _F) -> _F:
        """Decorate a function, so that each of its calls runs inside this region."""
        if not callable(func):
            ours = TypeError(
                f"autocast(...) can decorate a function, got {type(func).__name__}; "
                "to use it as a context manager, write `with autocast(...):`"
            )
            raise torch_words.error(ours, lambda: torch_words.region()(func))
        return autocast_decorator(self, func)

    def __repr__(self) -> str:
        if "_entries" not in vars(self):  # `__init__` has not finished
            return object.__repr__(self)
        casts_to = f"dtype={self.fast_dtype}" if self._policy is None else f"policy={self._policy}"
        cache = ", weight_cache=..." if any(policy is not self._policy for policy in self._extensions) else ""
        name = f"{type(self).__name__}({self.device!r}, {casts_to}"
        return f"{name}, enabled={self._enabled}, cache_enabled={self._caches}{cache})"


_TRACING = 0  # not the ident of a thread: while Dynamo traces, threads do not matter


_UnmanagedInTorch: Any = getattr(torchs, "_UnmanagedAutocast", torch.autocast)  # torch 2.11 has none


class _UnmanagedAutocast(autocast, _UnmanagedInTorch):  # type: ignore[misc]  # a class, but not on every version
    """A region of `_enter_autocast`, which no `with` statement ends."""


def _enter_autocast(*vals: Any) -> Any:
    """Enter a region and return what `_exit_autocast` takes, as in graphs that torch makes of regions.

    While such a graph is made, this adds a node of torch's to it instead, and returns the node.

    Args:
        *vals: The device type, and the dtype and flags of the region.
    """
    if is_torch_function_mode_enabled():
        node = record_enter_autocast(vals)
        return node or torch.overrides.handle_torch_function(_enter_autocast, [], *vals)
    region = _UnmanagedAutocast(*vals)
    region.__enter__()
    return region


def _exit_autocast(mode: Any) -> Any:
    """Leave the region that `_enter_autocast` has returned."""
    if is_torch_function_mode_enabled():
        return record_exit_autocast(()) or torch.overrides.handle_torch_function(_exit_autocast, [], mode)
    mode.__exit__(None, None, None)
    return None


def _dtype_of(policy: BoundPolicyLike, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that a policy's region casts to; None if only the policy's rules cast."""
    if not hasattr(policy, "low_precisions"):
        hint = ": write policy=policy.bind(model)" if hasattr(policy, "bind") else ""
        raise TypeError(f"policy must be a bound castwise.Policy or None, got {type(policy).__name__}{hint}")
    if dtype is not None:
        raise ValueError(f"a policy sets the dtype ({policy.policy.compute}): leave out dtype={dtype}")
    policy.check_is_bound()
    return policy.dtype


def _no_device_type(device_type: object) -> Exception:
    ours = ValueError(f"device_type must be a string such as 'cuda' or 'cpu', got {device_type!r}")
    return torch_words.error(ours, lambda: torch_words.region(device_type))


def _no_autocast(device_type: str, dtype: object) -> Exception:
    ours = RuntimeError(f"torch has no autocast for device_type {device_type!r}")
    return torch_words.error(ours, lambda: torch_words.region(device_type, dtype))


def _no_dtype(device_type: str, dtype: object) -> Exception:
    ours = TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
    return torch_words.error(
        ours, lambda: torch_words.switch(set_autocast_dtype, get_autocast_dtype, device_type, dtype)
    )


def _no_flag(device_type: str, enabled: object) -> Exception:
    ours = TypeError(f"enabled must be a bool, got {enabled!r}")
    return torch_words.error(
        ours, lambda: torch_words.switch(set_autocast_enabled, is_autocast_enabled, device_type, enabled)
    )


def _no_cache_flag(cache_enabled: object) -> Exception:
    ours = TypeError(f"cache_enabled must be a bool or None, got {cache_enabled!r}")
    return torch_words.error(
        ours, lambda: torch_words.switch(set_autocast_cache_enabled, is_autocast_cache_enabled, cache_enabled)
    )


@overload
def custom_fwd(fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Callable[[_F], _F]: ...
@overload
def custom_fwd(fwd: _F, *, device_type: str, cast_inputs: torch.dtype | None = None) -> _F: ...
def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Any:
    """Decorate the `forward` of a `torch.autograd.Function` for use inside autocast regions.

    It supports both kinds of Function: `forward(ctx, ...)`, and `forward(...)` with a separate `setup_context`
    (the kind that `torch.func` needs). With the second kind, `setup_context` receives the same inputs as `forward`,
    cast if `cast_inputs` is given.

    Args:
        fwd: The static method; omitted when the decorator is called with keyword arguments only.
        device_type: The device type whose autocast state matters.
        cast_inputs: If it is a dtype, floating-point tensors among the arguments and in their containers (except fp64)
            are cast to it, and `forward` runs with autocast disabled. If None, `forward` runs in the region's state.
            Outside an enabled region nothing is cast.

    Raises:
        ValueError: `device_type` is not a string.

    Example:
        >>> class Product(torch.autograd.Function):
        ...     @staticmethod
        ...     @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        ...     def forward(ctx, a, b):
        ...         ctx.save_for_backward(a, b)
        ...         return a @ b
        ...     @staticmethod
        ...     @custom_bwd(device_type="cpu")
        ...     def backward(ctx, grad):
        ...         a, b = ctx.saved_tensors
        ...         return grad @ b.T, a.T @ grad
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     Product.apply(torch.ones(2, 2), torch.ones(2, 2)).dtype
        torch.float32
    """
    if not isinstance(device_type, str):
        raise _no_device_type(device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    separate = SeparateContexts(device_type, cast_inputs)
    takes_ctx = _first_parameter(fwd) == "ctx"

    @run_while_tracing
    def find_setup_context() -> None:
        separate.record_for(decorate_fwd)

    @functools.wraps(fwd)
    def decorate_fwd(*args: Any, **kwargs: Any) -> Any:
        if args and (takes_ctx or hasattr(args[0], "save_for_backward")):
            record_autocast(args[0], device_type, cast_inputs)
        else:
            find_setup_context()
        if cast_inputs is None or not is_autocast_enabled(device_type):
            return fwd(*args, **kwargs)
        with autocast(device_type, enabled=False):
            return fwd(*_cast(args, device_type, cast_inputs), **_cast(kwargs, device_type, cast_inputs))

    return decorate_fwd


def _first_parameter(function: Callable[..., Any]) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except (TypeError, ValueError):  # a builtin such as torch.add shows none; as in torch, only a call refuses the rest
        return None


def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Decorate the `backward` of a `torch.autograd.Function`, so that it runs in the autocast state of its `forward`.

    Args:
        bwd: The static method; omitted when the decorator is called with keyword arguments only.
        device_type: The device type given to `custom_fwd`.

    Raises:
        ValueError: `device_type` is not a string.
        RuntimeError: In the backward, if `forward` is not decorated with `custom_fwd`.
    """
    if not isinstance(device_type, str):
        raise _no_device_type(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorate_bwd(*args: Any, **kwargs: Any) -> Any:
        if not is_forward_recorded(args[0]):
            ours = RuntimeError(
                "custom_bwd does not know the autocast state of the forward: "
                f"decorate forward with custom_fwd(device_type={device_type!r}). (A Function with a separate "
                "setup_context has to run once before torch.compile(fullgraph=True) can trace it.)"
            )
            raise torch_words.error(ours, lambda: recorded_forward(args[0]))
        enabled, dtype = recorded_forward(args[0])
        with autocast(device_type, dtype=dtype, enabled=enabled):
            return bwd(*args, **kwargs)

    return decorate_bwd
