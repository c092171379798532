"""Updates and epsilons lost in 16-bit weights, and fp32 optimizer state loaded as 16-bit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from castwise._mistakes.corrected_code import with_master_weights
from castwise._mistakes.finder import Finder
from castwise._mistakes.mistake import caller
from castwise.amp._devices import is_capturing
from castwise.amp._gradients import params_of

_LOW = (torch.bfloat16, torch.float16)
_EVERY = 100  # steps 1, 2, 4, 8, ... and every multiple of this are measured
_SAMPLED = 4096  # approximate number of elements per weight
_LOST_IN_FP16 = 2.0**-25  # half of the smallest number above 0
_MATTERS = 0.05  # smallest share of lost updates that is reported; the report uses the same threshold


class LowWeights(Finder):
    """Measures the updates that torch's optimizers lose in 16-bit weights. Other optimizers may compensate for them.

    An update is lost if the gradient is not zero and the weight does not change.
    """

    def __init__(self, watch: Any) -> None:
        super().__init__(watch)
        self._steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Report an epsilon that is 0 in fp16, and copy a sample of the weights if this step is measured."""
        self._before = []
        self._steps[optimizer] = step = self._steps.get(optimizer, 0) + 1
        if step == 1 and _is_torchs(optimizer, "step"):
            self._report_lost_epsilon(optimizer)
        if not (step % _EVERY == 0 or (step < _EVERY and step.bit_count() == 1)) or not _is_torchs(optimizer, "step"):
            return
        dtypes = {param.dtype for param in params_of(optimizer)}.intersection(_LOW)
        if "half-with-autocast" in [mistake.name for mistake in self.watch.found]:  # its report gives the remedy too
            dtypes.discard(torch.float16)
        if not dtypes or any(map(is_capturing, params_of(optimizer))) or _is_skipped(optimizer):
            return
        self._before = [
            (param, _sample(param).clone())
            for group in optimizer.param_groups
            for param in group["params"]
            if param.dtype in dtypes and param.layout is torch.strided and float(group.get("lr", 1.0)) != 0.0
        ]

    def optimizer_stepped_alone(self, optimizer: torch.optim.Optimizer) -> None:
        """Report lost updates."""
        before, self._before = self._before, []
        if not before:
            return
        tried, lost = torch.zeros(()), torch.zeros(())
        for param, old in before:
            if param.grad is not None and param.grad.layout is torch.strided:
                has_update = (_sample(param.grad) != 0) & old.isfinite()
                tried += has_update.sum().to(tried)
                lost += (has_update & (_sample(param) == old)).sum().to(lost)
        if not tried or lost / tried < _MATTERS:
            return
        dtype, name = before[0][0].dtype, type(optimizer).__name__
        self.watch.report(
            "updates-lost",
            f"{name} steps {_short(dtype)} weights here, and {100 * float(lost / tried):.0f}% of the updates of step "
            f"{self._steps[optimizer]} were lost: they are too small for {_short(dtype)}, so the weights did not "
            "change",
            partial(with_master_weights, dtype=dtype),
            caller(),
        )

    def stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Report lost updates of a step by a scaler."""
        self.optimizer_stepped_alone(optimizer)

    def state_loaded(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Report state that was fp32 in the checkpoint and is 16-bit now."""
        if not _is_torchs(optimizer, "load_state_dict"):
            return
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, params_of(optimizer), strict=False):
            saved, loaded = state_dict["state"].get(number, {}), optimizer.state.get(param, {})
            for name, value in saved.items():
                if _dtype(value) is torch.float32 and (dtype := _dtype(loaded.get(name))) in _LOW:
                    self._report_narrowed(name, dtype)
                    return

    def stop(self) -> None:
        """Drop the copies."""
        self._before = []

    def _report_lost_epsilon(self, optimizer: torch.optim.Optimizer) -> None:
        lost = [
            group["eps"]
            for group in optimizer.param_groups
            if isinstance(group.get("eps"), float)  # Adafactor has two, for other uses
            and 0.0 < group["eps"] <= _LOST_IN_FP16
            and not group.get("fused")  # which computes in fp32
            and any(param.dtype is torch.float16 for param in group["params"])
        ]
        if lost:
            name = type(optimizer).__name__
            self.watch.report(
                "epsilon-lost",
                f"{name} steps float16 weights here with eps={lost[0]:g}, which is 0 in float16, so it divides by 0 "
                "where a gradient or its square is 0: keep weights and state in fp32, or pass eps=1e-4",
                partial(with_master_weights, dtype=torch.float16),
                caller(),
            )

    def _report_narrowed(self, name: object, dtype: torch.dtype | None) -> None:
        self.watch.report(
            "state-narrowed",
            f"the checkpoint has {name!r} in fp32, and load_state_dict casts it to {_short(dtype)}, the dtype of the "
            "weights: training resumes with less precise state",
            partial(with_master_weights, dtype=dtype),
            caller(),
        )


def _is_torchs(optimizer: torch.optim.Optimizer, method: str) -> bool:
    """Return True if torch implements a method. A subclass's own method may recover lost updates."""
    module = getattr(getattr(type(optimizer), method), "__module__", "")
    return module.startswith("torch.optim.")


def _is_skipped(optimizer: Any) -> bool:
    """Return True if a scaler makes a fused optimizer skip this step."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf.item())


def _sample(tensor: Any) -> torch.Tensor:
    """Return a sample of this rank's elements. For large tensors the stride is odd, to cover all columns."""
    local: torch.Tensor = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    return local.flatten()[:: local.numel() // _SAMPLED | 1]


def _dtype(value: object) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
