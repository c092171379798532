"""What a scaler knows about one optimizer: for good, and since the last `update()`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from castwise.amp import unscaling
from castwise.amp.after_step import LastStep
from castwise.amp.gradients import Collector, params_of
from castwise.amp.measuring import Probe
from castwise.amp.readback import Flag


class Memory:
    """What is found out once about an optimizer: how it wants to step, and of which kinds its gradients are.

    Args:
        optimizer: Which it is about.
        number: How many came before it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        self.number = number
        self.collector = Collector()
        self.probe = Probe()
        self.last_step: LastStep | None = None
        # Before `grad_scale` it was the custom that an optimizer asked for the scaler itself.
        self._asks_for_scaler = (
            _supports_scaling(optimizer) and "grad_scaler" in inspect.signature(optimizer.step).parameters
        )

    def takes_scaler(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether an optimizer wants the scaler as an argument of its step."""
        return self._asks_for_scaler and _supports_scaling(optimizer)

    def takes_grad_scale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether an optimizer unscales, clips and skips by itself: a fused one does."""
        return not self._asks_for_scaler and _supports_scaling(optimizer)


def _supports_scaling(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_stepped_by_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer's step is one of torch's, not one that a subclass has put in its place."""
    return type(optimizer).step.__module__.startswith("torch.optim.")


class OptState(Enum):
    """How far an optimizer has come since the last `update()`."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


def new_state() -> dict[str, Any]:
    """Return the entry of an optimizer that nothing was done with, with torch's keys.

    Others come and go: "readback" of found_inf, "is_of_this_rank" (whether ranks have yet to agree on it), "finite"
    (facts about each parameter), "unscaled_by_clipping" (whether `unscale_` may still be called), "clipped" (the
    gradients that clipping has left), "clip_coef" (what a fused optimizer still has to multiply them with), "norm"
    (that clipping has found), "largest" (unscaled magnitude, if the schedule asks for it), "skipped".
    """
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def refuse_if_over(state: Mapping[str, Any], name: str) -> None:
    """Raise a RuntimeError that names the call if the optimizer was stepped or skipped."""
    if state["stage"] is not OptState.STEPPED:
        return
    if state.get("skipped"):
        raise RuntimeError(f"{name}() is being called after skip() of the same optimizer: call scaler.update() first")
    if name == "step":
        raise RuntimeError(
            "step() has already been called on this optimizer since the last update(): "
            "call scaler.update() once per iteration, after the last step()"
        )
    raise RuntimeError(
        f"{name}() is being called after step() of the same optimizer: call it before, "
        "or scaler.update() first if a new iteration begins"
    )


def readback_of(found: Mapping[torch.device, torch.Tensor]) -> Flag:
    """Ask a device for what was found on all of them."""
    flags = list(found.values())
    return Flag(flags, unscaling.combine(flags, flags[0]))


def is_to_be_skipped(state: dict[str, Any]) -> bool:
    """Say whether an optimizer's gradients are not finite; waits for the device."""
    found = state["found_inf_per_device"]
    if not found:
        return False
    readback: Flag | None = state.get("readback")
    if readback is None or not readback.is_of(list(found.values())):
        readback = state["readback"] = readback_of(found)
    return bool(readback)


def last_step(state: Mapping[str, Any], iteration: int) -> LastStep:
    """Return what `step` leaves for those who ask afterwards whether it was taken."""
    return LastStep(iteration, list(state["found_inf_per_device"].values()), state.get("readback"))


@contextmanager
def given(optimizer: torch.optim.Optimizer, **facts: torch.Tensor | None) -> Iterator[None]:
    """Set attributes of an optimizer for its step and remove them after it, or put back what was there if it fails."""
    before = {name: getattr(optimizer, name) for name in facts if hasattr(optimizer, name)}
    for name, value in facts.items():
        setattr(optimizer, name, value)
    try:
        yield
    except BaseException:
        for name in facts:
            delattr(optimizer, name)
        for name, value in before.items():
            setattr(optimizer, name, value)
        raise
    for name in facts:
        delattr(optimizer, name)


@contextmanager
def no_momentum_of_a_skipped_step(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> Iterator[None]:
    """Leave no momentum that a fused SGD has made room for in a step that it skips: it fills the room in a later one.

    torch 2.13 takes what happens to be in that memory for the momentum of the next step.
    """
    is_on_host = found_inf.device.type == "cpu"
    if not isinstance(optimizer, torch.optim.SGD) or (is_on_host and not found_inf.item()):
        yield
        return
    params = [param for param in params_of(optimizer) if "momentum_buffer" not in optimizer.state.get(param, {})]
    yield
    for param in params:
        made = optimizer.state.get(param, {}).get("momentum_buffer")
        if made is None:
            continue
        if is_on_host:
            del optimizer.state[param]["momentum_buffer"]
        else:
            made.masked_fill_(found_inf.to(made.device, non_blocking=True) != 0, 0.0)
