"""`GradScaler`: the state machine of gradient scaling. Nothing here is numeric.

What the gradients are and how they are unscaled is in `gradients`, how the scale moves in `schedules`. Attributes
with a leading underscore that torch's class has as well keep its names and meaning: subclasses and frameworks use
them, down to replacing `_unscale_grads_` on an instance.

Under `torch.compile` only `scale` is traced; the rest looks at optimizers and gradients as they are, and runs eagerly.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, overload

import torch
from torch.compiler import is_dynamo_compiling

from castwise._torch_private import are_functorch_transforms_active, never_traced
from castwise._warnings import warn
from castwise.amp import gradients
from castwise.amp.devices import amp_definitely_not_available
from castwise.amp.schedules import Dynamic, check_scale, integer

__all__ = ["GradScaler", "OptState"]


class OptState(Enum):
    """How far an optimizer has come since the last `update()`."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


def _refresh_per_optimizer_state() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class _MultiDeviceReplicator:
    """Copies of a tensor on other devices, each made when it is first asked for."""

    def __init__(self, master_tensor: torch.Tensor) -> None:
        self.master = master_tensor
        self._per_device_tensors: dict[torch.device, torch.Tensor] = {}

    def get(self, device: torch.device) -> torch.Tensor:
        """Return the copy on `device`; never the master itself, so that it may be written to."""
        copy = self._per_device_tensors.get(device)
        if copy is None:
            copy = self.master.to(device=device, non_blocking=True, copy=True)
            self._per_device_tensors[device] = copy
        return copy


class GradScaler(torch.amp.GradScaler):
    """Scale losses so that small gradients survive in fp16, and skip a step whose gradients are not finite.

    A training step is `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`; gradients are
    unscaled in `step`, or before it by `unscale_(optimizer)` for whoever wants to clip or look at them. The scale
    is an fp32 tensor on the device of the first loss and follows `schedules.Dynamic`.

    With its default arguments it does what `torch.amp.GradScaler` does, bit for bit, and is an instance of it.
    It differs where torch's is wrong: arguments that cannot work are refused, the scale never leaves
    [2**-126, 2**126], a gradient that unscaling would make infinite skips the step, a parameter of two optimizers
    is unscaled once, and an optimizer without gradients steps as it would without a scaler.

    Args:
        device: The type of device the losses live on. `"cuda"` on a machine without CUDA warns and disables.
        init_scale: The first scale, a power of two by custom, within [2**-126, 2**126].
        growth_factor: What the scale is multiplied by after `growth_interval` finite steps in a row; > 1.
        backoff_factor: What the scale is multiplied by after a skipped step; in (0, 1).
        growth_interval: Steps; >= 1.
        enabled: False makes every method pass through; the arguments are then not looked at, as in torch.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, or torch knows no such device.

    Warns:
        UserWarning: CUDA is asked for and missing.

    Example:
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaler.scale(weight.sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> weight.grad
        tensor([1., 1.])
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._device = _device_type(device)
        self._enabled = enabled
        self._init_scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0
        if enabled:
            self._take(self._schedule())
            if self._device == "cuda" and amp_definitely_not_available():
                warn("GradScaler: CUDA is not available. Disabling.", UserWarning, 2)
                self._enabled = False
        self._forget_device_state()

    def _take(self, schedule: Dynamic) -> None:
        for field in dataclasses.fields(schedule):
            setattr(self, f"_{field.name}", getattr(schedule, field.name))

    def _schedule(self) -> Dynamic:
        return Dynamic(self._init_scale, self._growth_factor, self._backoff_factor, self._growth_interval)

    def _forget_device_state(self) -> None:
        self._scale: torch.Tensor | None = None
        self._growth_tracker: torch.Tensor | None = None
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(_refresh_per_optimizer_state)
        self._owners: dict[int, Callable[[], object]] = {}
        self._unscaled = gradients.Ledger()
        self._unscaling_once = False
        # Given to _unscale_grads_ as inv_scale, this very tensor asks for a check that writes no gradient.
        self._check_only: torch.Tensor | None = None

    # -- scaling ------------------------------------------------------------------------------------------------

    @overload
    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...
    @overload
    def scale(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]: ...
    @overload
    def scale(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]: ...
    @overload
    def scale(self, outputs: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]: ...
    def scale(self, outputs: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor | Iterable[torch.Tensor]:
        """Multiply losses by the scale, on their own devices and without a sync.

        Args:
            outputs: A tensor of any shape, or an iterable of such (nested as you like).

        Returns:
            The products: lists, tuples and named tuples come back as what they were, other iterables as a generator.

        Raises:
            ValueError: There is something in `outputs` that is not a tensor.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            scale = self._scale_for(outputs)
            return self._watched(outputs * scale.to(device=outputs.device, non_blocking=True))
        scaled: Iterable[torch.Tensor] = self._scale_all(outputs, [])
        return scaled

    def _scale_all(self, outputs: object, copies: list[_MultiDeviceReplicator]) -> Any:
        if isinstance(outputs, torch.Tensor):
            if not copies:
                copies.append(_MultiDeviceReplicator(self._scale_for(outputs)))
            return self._watched(outputs * copies[0].get(outputs.device))
        if not isinstance(outputs, Iterable) or isinstance(outputs, (str, bytes, Mapping)):
            raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got {outputs!r}")
        scaled = (self._scale_all(output, copies) for output in outputs)
        if isinstance(outputs, tuple) and hasattr(outputs, "_make"):
            return outputs._make(scaled)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def _watched(self, scaled: torch.Tensor) -> torch.Tensor:
        """Let the ledger know of each backward that starts from a scaled loss, before it adds to any gradient."""
        if is_dynamo_compiling() or are_functorch_transforms_active():
            # No hooks there; the backward comes after this call, at least.
            if self._unscaled:
                self._unscaled.renew()
        elif scaled.requires_grad:
            scaled.register_hook(self._unscaled.before_backward)  # type: ignore[no-untyped-call]
        return scaled

    def _scale_for(self, output: torch.Tensor) -> torch.Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        assert self._scale is not None
        return self._scale

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise RuntimeError("the growth tracker exists already and the scale does not: set both or neither")
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None or self._growth_tracker is None:
            raise RuntimeError(
                f"{funcname}() needs a scale, which the first scale() makes: "
                "call scaler.scale(loss).backward() earlier in the iteration"
            )
        return self._scale, self._growth_tracker

    # -- unscaling and stepping ---------------------------------------------------------------------------------

    @never_traced
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer's parameters by the scale, in place, and note if any is not finite.

        For clipping or looking at gradients between the backward and `step`, once per `step` and after all
        gradients of the step are accumulated. Does not sync, except for CPU gradients.

        Raises:
            RuntimeError: Called twice, or after `step`, before an `update()`; or before the first `scale()`.
            TypeError: `optimizer` is not one.
            ValueError: There are fp16 gradients; nothing has been changed then.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(): "
                "call it once per step, and scaler.update() after the step"
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "unscale_() is being called after step() of the same optimizer: call it before, "
                "or scaler.update() first if a new iteration begins"
            )
        # fp32 division may be approximate on some devices; mps has no fp64.
        inv_scale = scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
        self._unscaling_once = True
        try:
            state["found_inf_per_device"] = self._find_inf(optimizer, inv_scale, allow_fp16=False)
        finally:
            self._unscaling_once = False
        state["stage"] = OptState.UNSCALED

    def _find_inf(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, *, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found_inf = torch.full((), 0.0, dtype=torch.float32, device=inv_scale.device)
        found = self._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # No gradient, no inf: the step counts as finite.
        return found or {found_inf.device: found_inf}

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale an optimizer's gradients; return the found_inf (fp32, shape ()) of each of their devices."""
        found_infs = _MultiDeviceReplicator(found_inf)
        with torch.no_grad():
            grads = gradients.gradients_of(optimizer, allow_fp16=allow_fp16)
            if inv_scale is self._check_only:
                divisors = _MultiDeviceReplicator(self._divisor(optimizer))
                for device, lists in gradients.by_device(grads).items():
                    for values in lists:
                        gradients.check(values, divisors.get(device), found_infs.get(device))
                return found_infs._per_device_tensors
            # Whoever calls this method by himself, with a factor of his own, gets what he asks for.
            parts = self._unscaled.split(grads) if self._unscaling_once else [(None, grads)]
            for condition, part in parts:
                inv_scales = _MultiDeviceReplicator(_only_if(condition, inv_scale))
                for device, lists in gradients.by_device(part).items():
                    for values in lists:
                        gradients.unscale_(values, inv_scales.get(device), found_infs.get(device))
            if self._unscaling_once:
                self._unscaled.record(grads)
        return found_infs._per_device_tensors

    def _divisor(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """What a fused optimizer has to divide its gradients by: the scale times a `grad_scale` of the user's."""
        scale = self._get_scale_async()
        assert scale is not None
        grad_scale = getattr(optimizer, "grad_scale", None)
        return scale if grad_scale is None else scale * grad_scale

    @never_traced
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer on unscaled gradients, unless they are not finite: then nothing but the skip is noted.

        Syncs with the host to learn whether to skip, except for fused optimizers, which decide on the device.

        Args:
            optimizer: The optimizer whose gradients come from scaled losses.
            *args: Passed to `optimizer.step`.
            **kwargs: Passed to `optimizer.step`.

        Returns:
            What `optimizer.step` returned; None when the step was skipped.

        Raises:
            RuntimeError: Called twice before an `update()`, or before the first `scale()`, or with a closure.
            TypeError: `optimizer` is not one.
            ValueError: There are fp16 gradients; nothing has been changed then.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        _refuse_closure(args, kwargs)
        self._check_scale_growth_tracker("step")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called on this optimizer since the last update(): "
                "call scaler.update() once per iteration, after the last step()"
            )
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            returned = self._step_with_scale(optimizer, state, *args, **kwargs)
        else:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            returned = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return returned

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if any(found_inf.item() for found_inf in optimizer_state["found_inf_per_device"].values()):
            return None
        return optimizer.step(*args, **kwargs)

    def _step_with_scale(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Let an optimizer that can do so unscale and skip by itself."""
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            warn(
                "an optimizer's step(grad_scaler=...) is deprecated: read the tensors grad_scale and found_inf "
                "that GradScaler sets on the optimizer instead",
                FutureWarning,
                3,
            )
            return optimizer.step(*args, **kwargs | {"grad_scaler": self})
        grads = gradients.gradients_of(optimizer, allow_fp16=True)
        if state["stage"] is OptState.READY and any(c is not None for c, _ in self._unscaled.split(grads)):
            # One grad_scale speaks for all of its gradients, and some are unscaled already.
            self.unscale_(optimizer)
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        scale, _ = self._check_scale_growth_tracker("step")
        found_inf = _combine(state["found_inf_per_device"].values(), scale.device)
        unscaled = state["stage"] is OptState.UNSCALED
        before = {name: getattr(optimizer, name) for name in _STEP_FACTS if hasattr(optimizer, name)}
        optimizer.grad_scale = before.get("grad_scale") if unscaled else self._divisor(optimizer)  # type: ignore[attr-defined]
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        try:
            returned = optimizer.step(*args, **kwargs)
        except BaseException:
            _restore(optimizer, before)
            raise
        _restore(optimizer, {})
        # torch's fused kernels write the gradients back unscaled, unless they skip; of others nothing is known.
        if not unscaled and type(optimizer).__module__.startswith("torch.optim."):
            self._unscaled.record(grads, unless=found_inf)
        return returned

    @never_traced
    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
        """Note whether an optimizer could step on gradients divided by the scale, without writing them."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        if self._check_only is None or self._check_only.device != scale.device:
            self._check_only = torch.ones((), dtype=torch.float32, device=scale.device)
        found = self._find_inf(optimizer, self._check_only, allow_fp16=True)
        self._state_of(optimizer)["found_inf_per_device"] = found
        return found

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
        found: dict[Any, torch.Tensor] = self._state_of(optimizer)["found_inf_per_device"]
        return found

    def _state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's entry in `_per_optimizer_states`, never one of a dead optimizer with the same id."""
        key, states = id(optimizer), self._per_optimizer_states
        owner = self._owners.get(key)
        if owner is not None and owner() is not optimizer and key in states:
            # The dead one's found_inf still counts in the next update().
            orphan = states.pop(key)
            states[-1 - len(states)] = orphan
        self._owners[key] = _weak(optimizer)
        return states[key]

    # -- moving the scale ---------------------------------------------------------------------------------------

    @never_traced
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """End an iteration: move the scale by what its steps met, once for all optimizers.

        Args:
            new_scale: Set the scale to this instead: a number, or a tensor of one element (that is read on the
                host) on the scaler's type of device, without `requires_grad`. The growth tracker stays.

        Raises:
            RuntimeError: Before the first `scale()`, or without `new_scale` when nothing was stepped or unscaled.
            TypeError: `new_scale` is neither a number nor such a tensor.
            ValueError: `new_scale` is outside [2**-126, 2**126].
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            scale.fill_(self._number(new_scale))
        else:
            states = self._per_optimizer_states.values()
            found_infs = [found_inf for state in states for found_inf in state["found_inf_per_device"].values()]
            if not found_infs:
                raise RuntimeError(
                    "No inf checks were recorded prior to update(): call scaler.step(optimizer) or "
                    "scaler.unscale_(optimizer) since the last one"
                )
            self._schedule().advance_(scale, growth_tracker, _combine(found_infs, scale.device))
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._owners.clear()
        self._unscaled.clear()

    def _number(self, new_scale: float | torch.Tensor) -> float:
        if not isinstance(new_scale, torch.Tensor):
            return check_scale("new_scale", new_scale)
        if new_scale.numel() != 1 or new_scale.requires_grad or new_scale.device.type != self._device:
            raise TypeError(
                f"new_scale must be a number or a one-element tensor on {self._device} without requires_grad, "
                f"got {tuple(new_scale.shape)} on {new_scale.device.type}, requires_grad={new_scale.requires_grad}"
            )
        return check_scale("new_scale", new_scale.item())

    # -- looking and saving -------------------------------------------------------------------------------------

    def _get_scale_async(self) -> torch.Tensor | None:
        return self._scale

    @never_traced
    def get_scale(self) -> float:
        """Return the scale as a Python number, which syncs with the device; 1.0 when disabled."""
        if not self._enabled:
            return 1.0
        if self._unscaled:
            self._unscaled.renew()  # a loss may be scaled by hand with it
        scale = self._get_scale_async()
        return self._init_scale if scale is None else float(scale.item())

    def get_growth_factor(self) -> float:
        """Return what the scale is multiplied by when it grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by when it grows; checked as in the constructor."""
        self._growth_factor = Dynamic(growth_factor=new_factor).growth_factor

    def get_backoff_factor(self) -> float:
        """Return what the scale is multiplied by after a skipped step."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after a skipped step; checked as in the constructor."""
        self._backoff_factor = Dynamic(backoff_factor=new_factor).backoff_factor

    def get_growth_interval(self) -> int:
        """Return the number of finite steps after which the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of finite steps after which the scale grows; checked as in the constructor."""
        self._growth_interval = Dynamic(growth_interval=new_interval).growth_interval

    @never_traced
    def _get_growth_tracker(self) -> int:
        if not self._enabled:
            return 0
        return self._init_growth_tracker if self._growth_tracker is None else int(self._growth_tracker.item())

    def is_enabled(self) -> bool:
        """Say whether this scaler scales; False also if it was made for CUDA where there is none."""
        return self._enabled

    @never_traced
    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, in the format of torch's scaler; empty when disabled. Syncs with the device.

        Returns:
            `scale`, `growth_factor`, `backoff_factor` (floats), `growth_interval` and `_growth_tracker` (ints).
        """
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
        }

    @never_traced
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state from `state_dict()`, ours or torch's; a disabled scaler ignores it.

        Raises:
            RuntimeError: It is empty, as a disabled scaler's is.
            TypeError: It is not a mapping, or an entry has the wrong type. Nothing has been changed then.
            ValueError: An entry is missing, unknown or out of its range. Nothing has been changed then.
        """
        if not self._enabled:
            return
        schedule, growth_tracker = _checked(state_dict)
        self._take(schedule)
        self._init_growth_tracker = growth_tracker
        if self._scale is not None:
            self._scale.fill_(schedule.init_scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(growth_tracker)

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and self._per_optimizer_states:
            raise RuntimeError(
                "a GradScaler can be pickled or copied only at the beginning of an iteration: "
                "call scaler.update() before"
            )
        # Device tensors and what belongs to this process stay; numbers travel and are put on a device lazily.
        state = {name: value for name, value in self.__dict__.items() if name not in _PROCESS_LOCAL}
        return state | {
            "_init_scale": self.get_scale() if self._enabled else self._init_scale,
            "_init_growth_tracker": self._get_growth_tracker(),
            "_scale": None,
            "_growth_tracker": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget_device_state()
        self.__dict__.update(state)


_STEP_FACTS = ("grad_scale", "found_inf")
_PROCESS_LOCAL = ("_per_optimizer_states", "_owners", "_unscaled", "_unscaling_once", "_check_only")
_STATE_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def _device_type(device: object) -> str:
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device must be a string such as 'cuda' or 'cpu', got {device!r}")
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise ValueError(
            f"device must be a type of device that torch knows, such as 'cuda' or 'cpu', got {device!r}"
        ) from error


def _refuse_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if callable(kwargs.get("closure", args[0] if args else None)):
        raise RuntimeError(
            "a closure would run on scaled gradients: call it yourself and then scaler.step(optimizer), "
            "or leave an optimizer that needs one, such as LBFGS, without a scaler"
        )


def _only_if(condition: torch.Tensor | float | None, inv_scale: torch.Tensor) -> torch.Tensor:
    """Return `inv_scale` where a condition of `Ledger.split` holds and 1 where it does not."""
    if condition is None:
        return inv_scale
    if isinstance(condition, float):
        return torch.ones_like(inv_scale)
    return torch.where(condition.to(inv_scale.device) != 0, inv_scale, torch.ones_like(inv_scale))


def _combine(found_infs: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return one found_inf, shape (), that is 1 if any is not zero: fused kernels compare with exactly 1."""
    flags = [found_inf.to(device, non_blocking=True).reshape(()) for found_inf in found_infs]
    return flags[0] if len(flags) == 1 else torch.stack(flags).amax()


def _restore(optimizer: torch.optim.Optimizer, before: Mapping[str, Any]) -> None:
    """Put an optimizer's grad_scale and found_inf back to what they were, or remove them."""
    for name in _STEP_FACTS:
        if name in before:
            setattr(optimizer, name, before[name])
        else:
            delattr(optimizer, name)


def _weak(optimizer: object) -> Callable[[], object]:
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer  # cannot be referenced weakly, so it is kept alive until update()


def _checked(state_dict: Mapping[str, Any]) -> tuple[Dynamic, int]:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping as from state_dict(), got {type(state_dict).__name__}")
    if not state_dict:
        raise RuntimeError(
            "the source state dict is empty, probably saved from a disabled GradScaler: do not load it, "
            "or load it into a disabled scaler"
        )
    missing, unknown = set(_STATE_KEYS) - set(state_dict), set(state_dict) - set(_STATE_KEYS)
    if missing or unknown:
        raise ValueError(
            f"state_dict must have exactly the entries {', '.join(_STATE_KEYS)}: "
            f"missing {sorted(missing)}, unknown {sorted(map(str, unknown))}"
        )
    growth_tracker = integer("_growth_tracker", state_dict["_growth_tracker"])
    if not 0 <= growth_tracker < 2**31:
        raise ValueError(f"_growth_tracker must be an integer in [0, 2**31), got {growth_tracker!r}")
    schedule = Dynamic(
        init_scale=check_scale("scale", state_dict["scale"]),
        growth_factor=state_dict["growth_factor"],
        backoff_factor=state_dict["backoff_factor"],
        growth_interval=state_dict["growth_interval"],
    )
    return schedule, growth_tracker
