"""`autocast`: a region of code in which ops run in a lower precision, and the casting of custom autograd Functions.

Which op runs in which dtype is decided by torch's native dispatch; a region sets the thread's four autocast
switches (enabled, dtype, cache, nesting) on entry and puts them back on exit. Two requirements shaped the code:

* One object may be entered again while it is active, and from several threads at once (a decorated function is
  just that), so what has to be put back is kept per thread and per entry, never as a plain attribute.
* `torch.compile` traces a region made inside the compiled function line by line, and takes one that was made
  outside by its attributes `device`, `fast_dtype`, `_enabled` and `_cache_enabled`: these names are its interface.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar, overload

import torch
from torch import (
    autocast_decrement_nesting,
    autocast_increment_nesting,
    clear_autocast_cache,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_autocast_enabled,
    set_autocast_cache_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
)
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from castwise._torch_private import (
    compile_backwards_as,
    compile_backwards_without_autocast,
    is_torch_function_mode_enabled,
    jit_internal,
    only_inlined,
    record_enter_autocast,
    record_exit_autocast,
    run_while_tracing,
)
from castwise.amp import _traced_region
from castwise.amp.bound_policy import BoundPolicy
from castwise.amp.casting import cast_floats
from castwise.amp.custom_function import SeparateContexts, record_autocast
from castwise.amp.custom_function import _cast as _cast  # torch has it here
from castwise.amp.devices import can_autocast_to, has_autocast, is_autocast_available
from castwise.amp.emulation import warn_if_emulated
from castwise.amp.in_force import THREAD, resume, suspend
from castwise.amp.observers import OBSERVERS
from castwise.amp.policy import Policy
from castwise.amp.weight_cache import WeightCache

__all__ = ["autocast", "autocast_decorator", "custom_bwd", "custom_fwd", "is_autocast_available"]

_F = TypeVar("_F", bound=Callable[..., Any])


def autocast_decorator(autocast_instance: autocast, func: _F) -> _F:
    """Wrap `func` so that each of its calls runs inside the region `autocast_instance`."""

    device = autocast_instance.device
    policy = getattr(autocast_instance, "_policy", None)
    output = None if policy is None else policy.output

    @functools.wraps(func)
    def decorate_autocast(*args: Any, **kwargs: Any) -> Any:
        with autocast_instance:
            result = func(*args, **kwargs)
            return result if output is None else cast_floats(result, device, output)

    # TorchScript looks for this attribute and raises its value.
    decorate_autocast.__script_unsupported = "a function decorated by autocast cannot be scripted"  # type: ignore[attr-defined]
    return decorate_autocast  # type: ignore[return-value]  # wraps() keeps the signature


class autocast(torch.autocast):  # noqa: N801  # torch's name
    """Run ops of a region in a lower precision, chosen op by op: context manager and decorator.

    Matrix products and convolutions run in `dtype`, ops that need range or precision in fp32, the rest in the
    dtype of their inputs: the lists are torch's own. The region should hold the forward and the loss; the
    backward runs outside, in the dtypes that the forward chose, also of what `torch.compile` compiles in the region
    (unless `torch._functorch.config.backward_pass_autocast` says else). Entering and leaving does not sync with the
    device.

    The state is thread-local: a new thread starts outside of any region. Regions nest, in any mixture of devices,
    dtypes, `enabled=False`, and with themselves.

    Args:
        device_type: `"cuda"`, `"cpu"`, `"xpu"`, ...: the `type` of the tensors' device.
        dtype: The low precision, `torch.float16` or `torch.bfloat16`; None takes torch's default for the device
            (`torch.get_autocast_dtype`).
        enabled: False makes the region run everything as it would outside.
        cache_enabled: Keep each fp32 weight's cast until the outermost region ends; None takes the thread's setting.
        weight_cache: Keep casts of a model's weights beyond the region, until the weights change; see `WeightCache`.
        policy: Says the dtypes of modules and ops, and takes the place of `dtype`; see `Policy`. A region within
            suspends it; one of torch's own does if it changes the dtype or whether autocast is enabled.

    Raises:
        ValueError: `device_type` is not a string, or `dtype` is given with a policy.
        TypeError: `dtype` is not a `torch.dtype`, a flag not a bool, or the policy not bound to a model.
        RuntimeError: torch has no autocast for the device, or the GPU has no bfloat16.

    Warns:
        UserWarning: The device is missing or does not autocast to `dtype`; the region is then disabled. Or, once a
            process and dtype, the CPU has no units for it, and emulates it slowly.

    Example:
        >>> linear = torch.nn.Linear(4, 4)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     linear(torch.ones(1, 4)).dtype
        torch.bfloat16
    """

    @only_inlined
    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        weight_cache: WeightCache | None = None,
        policy: BoundPolicy | None = None,
    ) -> None:
        if jit_internal.is_scripting():
            self.device, self._enabled = device_type, enabled
            self.fast_dtype = get_autocast_dtype(device_type) if dtype is None else dtype
            return
        _check_device_type(device_type)
        if not has_autocast(device_type):
            raise RuntimeError(f"torch has no autocast for device_type {device_type!r}")
        self.device = device_type
        if policy is not None:
            dtype = _dtype_of(policy, dtype)
        self.fast_dtype = get_autocast_dtype(device_type) if dtype is None else dtype
        if not isinstance(self.fast_dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
        # Flags are looked at here: torch's setters would refuse them when the region has been half entered.
        if enabled is not True and enabled is not False:
            raise TypeError(f"enabled must be a bool, got {enabled!r}")
        if cache_enabled is None:
            cache_enabled = is_autocast_cache_enabled()
        elif cache_enabled is not True and cache_enabled is not False:
            raise TypeError(f"cache_enabled must be a bool or None, got {cache_enabled!r}")
        self._caches = cache_enabled
        self._enabled = enabled and can_autocast_to(device_type, self.fast_dtype)
        self._policy = None
        if policy is not None and self._enabled:
            can_autocast = all(can_autocast_to(device_type, low) for low in policy.low_precisions)
            self._policy = policy if can_autocast else None
            self._enabled = can_autocast and policy.dtype is not None
        if device_type == "cpu" and (self._enabled or self._policy is not None):
            for low in (self.fast_dtype,) if policy is None else policy.low_precisions:
                warn_if_emulated(low)
        if weight_cache is not None and not isinstance(weight_cache, WeightCache):
            raise TypeError(f"weight_cache must be a castwise.WeightCache or None, got {type(weight_cache).__name__}")
        self._weight_cache = weight_cache
        # By thread: enabled, dtype and cache outside of the region, what substitutes weights inside, what the policy
        # undoes, how backwards are compiled outside, and the same of an earlier entry still active.
        self._outer: dict[int, tuple[bool, torch.dtype, bool, TorchFunctionMode | None, Any, Any, Any]] = {}

    @property
    def _cache_enabled(self) -> bool:  # type: ignore[override]  # torch's is an attribute
        """What Dynamo asks for when it enters a region that was made outside of the function it compiles.

        It would go by this and three more attributes, and leave out the policy.
        """
        if self._policy is not None:
            raise RuntimeError(
                "a compiled function enters a region with a policy that was made outside of it: "
                "make the region inside of the function, or enter it outside"
            )
        return self._caches

    @only_inlined
    def __enter__(self) -> Self:
        if jit_internal.is_scripting():
            return self
        device = self.device
        thread = 0 if is_dynamo_compiling() else get_ident()
        policy = self._policy
        if policy is not None:
            policy.check_is_bound()
        substitution = None
        if self._weight_cache is not None and (self._enabled or policy is not None) and thread != 0:
            substitution = self._weight_cache.mode(device)
            substitution.__enter__()  # type: ignore[no-untyped-call]  # before the policy's mode, which casts first
        self._outer[thread] = (
            is_autocast_enabled(device),
            get_autocast_dtype(device),
            is_autocast_cache_enabled(),
            substitution,
            None if policy is None and THREAD.state is None else self._put_in_force(),
            compile_backwards_without_autocast() if thread != 0 else None,
            self._outer.get(thread),
        )
        if thread == 0:
            _traced_region.prepare(device)
            _traced_region.enter(device, self._enabled, self.fast_dtype, self._caches)
            return self
        set_autocast_enabled(device, self._enabled)
        set_autocast_dtype(device, self.fast_dtype)
        autocast_increment_nesting()
        set_autocast_cache_enabled(self._caches)
        if is_torch_function_mode_enabled():
            record_enter_autocast((device, self.fast_dtype, self._enabled, self._caches))
        for observer in OBSERVERS:
            observer.entered(self)
        return self

    @only_inlined
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> bool | None:
        if jit_internal.is_scripting():
            return None
        device = self.device
        thread = 0 if is_dynamo_compiling() else get_ident()
        outer = self._outer.pop(thread, None)
        if outer is None:
            return self._leave_elsewhere()
        enabled, dtype, cache_enabled, substitution, in_force, backwards, before = outer
        if self._policy is not None:
            self._policy.leave(in_force)
        elif in_force is not None:
            resume(in_force)
        if substitution is not None:
            substitution.__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]  # torch's
        if before is not None:
            self._outer[thread] = before
        if thread == 0:
            _traced_region.leave(device, enabled, dtype, cache_enabled)
            return False
        if autocast_decrement_nesting() == 0:
            clear_autocast_cache()
        set_autocast_enabled(device, enabled)
        set_autocast_dtype(device, dtype)
        set_autocast_cache_enabled(cache_enabled)
        if backwards is not None:
            compile_backwards_as(backwards)
        if is_torch_function_mode_enabled():
            record_exit_autocast(())
        for observer in OBSERVERS:
            observer.left(self)
        return False

    @only_inlined
    def _put_in_force(self) -> Any:
        """Put the region's policy in force in this thread, or none; return what undoes it."""
        if self._policy is not None:
            return self._policy.enter(self.device, self._enabled, self.fast_dtype, self._caches)
        return suspend()

    def _leave_elsewhere(self) -> bool:
        """Leave in a thread that did not enter, as a generator does that is closed there: nothing to put back."""
        if not self._outer:
            raise RuntimeError("this autocast region is left, but was not entered")
        return False

    def __call__(self, func: _F) -> _F:
        """Decorate a function: each of its calls runs inside this region."""
        if jit_internal.is_scripting():
            return func
        if not callable(func):
            raise TypeError(
                f"autocast(...) decorates a function, got {type(func).__name__}; "
                "as a context manager it is written `with autocast(...):`"
            )
        return autocast_decorator(self, func)


def _dtype_of(policy: BoundPolicy, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that a policy's region casts to; None if autocast is off in it but for rules."""
    if not isinstance(policy, BoundPolicy):
        hint = ": write policy=policy.bind(model)" if isinstance(policy, Policy) else ""
        raise TypeError(f"policy must be a bound castwise.Policy or None, got {type(policy).__name__}{hint}")
    if dtype is not None:
        raise ValueError(f"a policy says the dtype ({policy.policy.compute}): leave out dtype={dtype}")
    policy.check_is_bound()
    return policy.dtype


def _check_device_type(device_type: object) -> None:
    if not isinstance(device_type, str):
        raise ValueError(f"device_type must be a string such as 'cuda' or 'cpu', got {device_type!r}")


@overload
def custom_fwd(fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Callable[[_F], _F]: ...
@overload
def custom_fwd(fwd: _F, *, device_type: str, cast_inputs: torch.dtype | None = None) -> _F: ...
def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Any:
    """Decorate the `forward` of a `torch.autograd.Function` for use inside autocast regions.

    Works for both kinds of Function: `forward(ctx, ...)`, and `forward(...)` with a separate `setup_context`
    (the kind that `torch.func` needs). In the second kind `setup_context` receives the inputs as `forward` did,
    cast if `cast_inputs` is given.

    Args:
        fwd: The static method; left out when the decorator is called with arguments only.
        device_type: The device type whose autocast state matters.
        cast_inputs: With a dtype, floating-point tensors among the arguments (fp64 excepted, containers looked
            into) are cast to it and `forward` runs with autocast disabled. None lets `forward` run in the region's
            state. Outside of an enabled region nothing is cast.

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
    _check_device_type(device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    separate = SeparateContexts(device_type, cast_inputs)
    takes_ctx = next(iter(inspect.signature(fwd).parameters), None) == "ctx"

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


def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Decorate the `backward` of a `torch.autograd.Function`: it runs in the autocast state of its `forward`.

    Args:
        bwd: The static method; left out when the decorator is called with arguments only.
        device_type: The device type given to `custom_fwd`.

    Raises:
        ValueError: `device_type` is not a string.
        RuntimeError: In the backward, when `forward` was not decorated by `custom_fwd`.
    """
    _check_device_type(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorate_bwd(*args: Any, **kwargs: Any) -> Any:
        enabled = getattr(args[0], "_fwd_used_autocast", None)
        if enabled is None:
            raise RuntimeError(
                "custom_bwd does not know the autocast state of the forward: "
                f"decorate forward with custom_fwd(device_type={device_type!r}). (A Function with a separate "
                "setup_context has to run once before torch.compile(fullgraph=True) can trace it.)"
            )
        with autocast(device_type, dtype=args[0]._dtype, enabled=enabled):
            return bwd(*args, **kwargs)

    return decorate_bwd
