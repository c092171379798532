"""The scaler of a plugin, and the end of its iterations, for Trainer and Fabric.

Lightning ends an iteration of the scaler with every step of every optimizer. This is correct if each backward is
followed by the step of its optimizer. If the backwards of several optimizers come first, the scale may change before
all of them have stepped, and later steps divide by the wrong scale. Here an iteration ends with the step if no other
parameters have gradients, and otherwise before the next backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from castwise._torch_private import is_fsdp_flattened
from castwise.amp.grad_scaler import GradScaler
from castwise.monitor._local_shards import is_dtensor

Precision: TypeAlias = Literal["16-mixed", "bf16-mixed"]

_DTYPES: dict[str, torch.dtype] = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class Scaling:
    """The scaler of a plugin.

    Args:
        precision: Precision of the forward; in fp16 losses are scaled.
        device: Device type of the model.
        scaler: The scaler to use, also in bf16; None creates one in fp16.

    Raises:
        TypeError: `scaler` is not a castwise scaler.
        ValueError: `precision` is invalid.
    """

    def __init__(self, precision: Precision, device: str, scaler: GradScaler | None) -> None:
        if precision not in _DTYPES:
            raise ValueError(f"precision must be '16-mixed' or 'bf16-mixed', got {precision!r}")
        if scaler is not None and not isinstance(scaler, GradScaler):
            kind = f"{type(scaler).__module__}.{type(scaler).__name__}"
            raise TypeError(f"scaler must be a castwise.GradScaler or castwise.ShardedGradScaler, got a {kind}")
        self.precision: Precision = precision
        self.device = device
        self._dtype = _DTYPES[precision]
        self._scaler = scaler
        self._models: list[weakref.ref[nn.Module]] = []
        self._stepped: list[torch.optim.Optimizer] = []

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler; None in bf16 unless one was given.

        In fp16 it is created on first use: a `ShardedGradScaler` if the model is split over ranks by then (FSDP, tensor
        parallelism), otherwise a `GradScaler`.
        """
        if self._scaler is None and self.precision == "16-mixed":
            if self._is_split():
                from castwise.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

                self._scaler = ShardedGradScaler(self.device)
            else:
                self._scaler = GradScaler(self.device)
        return self._scaler

    def _parameters(self) -> Iterator[nn.Parameter]:
        for model in filter(None, (reference() for reference in self._models)):
            yield from model.parameters()

    def _is_split(self) -> bool:
        return any(is_dtensor(parameter) or is_fsdp_flattened(parameter) for parameter in self._parameters())

    def _check_rank_agreement(self) -> None:
        scaler, dist = self.scaler, torch.distributed
        if scaler is None or not scaler.is_enabled() or scaler.agrees:
            return
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and self._is_split():
            raise RuntimeError(
                "the model is split over ranks, which must skip the same steps, and this scaler does not synchronize "
                f"them: pass scaler=castwise.ShardedGradScaler({self.device!r}) to the plugin"
            )

    def _step(self, scaler: GradScaler, optimizer: torch.optim.Optimizer, *, is_only_one: bool, **kwargs: Any) -> Any:
        if optimizer in self._stepped or "closure" in kwargs:  # a closure computes new gradients
            self.update_if_due()
        output = scaler.step(optimizer, **kwargs)
        self._stepped.append(optimizer)
        if is_only_one or not self._others_have_gradients():
            self.update_if_due()
        return output

    def _others_have_gradients(self) -> bool:
        """Return True if parameters that were not stepped have gradients."""
        groups = (group for optimizer in self._stepped for group in optimizer.param_groups)
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        return any(parameter.grad is not None and id(parameter) not in stepped for parameter in self._parameters())

    def update_if_due(self) -> None:
        """End the scaler's iteration if an optimizer has stepped in it."""
        if self._stepped and self._scaler is not None:
            self._stepped.clear()
            self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty without a scaler."""
        self.update_if_due()
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this plugin or of Lightning's own. It is ignored without a scaler."""
        self._stepped.clear()
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)
