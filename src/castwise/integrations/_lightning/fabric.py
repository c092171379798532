"""The plugin for Fabric, without the Lightning classes that it derives from."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from castwise._live_objects import instances_of
from castwise._torch_private import is_fsdp_flattened
from castwise.amp._gradients import params_of
from castwise.amp.autocast_mode import autocast
from castwise.amp.grad_scaler import GradScaler
from castwise.integrations._lightning.scaling import Precision, Scaling
from castwise.master_weights._clipping import clipping_factor, grads_of
from castwise.master_weights._master_weights import MasterWeights
from castwise.master_weights._parameter_clipping import on_mesh_of


class FabricPrecision(Scaling):
    """The plugin interface of Fabric. Like `TrainerPrecision`, it does not call Lightning's mixed-precision plugin."""

    _plain: Any  # Lightning's full-precision plugin, a different class in each of its packages
    _fabric_optimizer: Any  # Fabric's wrapper around users' optimizers
    _strategy: type  # the base class of Fabric's strategies

    def __init__(self, precision: Precision, device: str, scaler: GradScaler | None = None) -> None:
        super().__init__(precision, device, scaler)
        self._desired_input_dtype = self._dtype  # Lightning casts the model's arguments to it
        self._are_ranks_checked = False

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Register a model that is being set up. It is split over ranks only after this."""
        self._clip_for_strategy()
        self._models = [*(reference for reference in self._models if reference() is not None), weakref.ref(module)]
        self._are_ranks_checked = False
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the region of a forward."""
        return autocast(self.device, self._dtype)

    def backward(self, tensor: torch.Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale a loss and run its backward."""
        if not self._are_ranks_checked:
            self._check_rank_agreement()
            self._are_ranks_checked = True
        self.update_if_due()
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        self._plain.backward(self, tensor, model, *args, **kwargs)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Step, or skip the step if gradients are not finite."""
        if self.scaler is None:
            return self._plain.optimizer_step(self, optimizer, **kwargs)
        return self._step(self.scaler, optimizer, is_only_one=False, **kwargs)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale gradients for `fabric.clip_gradients`, which reads them again."""
        if self.scaler is not None:
            self.scaler.unscale_(self._unwrapped(optimizer))

    def _clip_for_strategy(self) -> None:
        """Clip a `MasterWeights` in fp32 where `fabric.clip_gradients` has torch clip its 16-bit gradients.

        Fabric asks the strategy to clip, and never gives it to its precision plugin.
        """
        strategies: list[Any] = instances_of(self._strategy)
        for strategy in strategies:
            if strategy.precision is self and not isinstance(strategy.clip_gradients_norm, functools.partial):
                strategy.clip_gradients_norm = functools.partial(self._clip_norm, strategy.clip_gradients_norm)
                strategy.clip_gradients_value = functools.partial(self._clip_value, strategy.clip_gradients_value)

    def _clip_norm(
        self,
        theirs: Callable[..., torch.Tensor],
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        if not isinstance(optimizer, MasterWeights) or any(map(is_fsdp_flattened, params_of(optimizer))):
            return theirs(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        if self.scaler is None:
            norm = optimizer.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        else:
            # Fabric unscales before it clips. One factor for both would be rounded otherwise in a fused step.
            norm = self.scaler.clip_grad_norm_(optimizer, math.inf, norm_type, error_if_nonfinite)
            optimizer._clip_once_unscaled(factor=clipping_factor(norm, max_norm))
        return on_mesh_of(norm, grads_of(params_of(optimizer)))

    def _clip_value(
        self, theirs: Callable[..., None], module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float
    ) -> None:
        if not isinstance(optimizer, MasterWeights) or any(map(is_fsdp_flattened, params_of(optimizer))):
            theirs(module, optimizer, clip_val)
        elif self.scaler is None:
            optimizer.clip_grad_value_(clip_val)
        else:
            self.scaler.clip_grad_value_(optimizer, clip_val)

    def clip_grad_norm_(
        self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip the gradients of an optimizer to a norm in one read, instead of with `fabric.clip_gradients`.

        If gradients are not finite they are not changed, and the step is skipped.

        Args:
            optimizer: The optimizer; the gradients of all its parameters form one vector.
            max_norm: Largest norm of the gradients, >= 0; inf only measures.
            norm_type: The p of the p-norm, > 0 or inf.

        Returns:
            The norm of the unscaled gradients before clipping, shape ().

        Raises:
            RuntimeError: There is no scaler. Use `fabric.clip_gradients` then, unless the optimizer is a
                `MasterWeights`.
        """
        inner = self._unwrapped(optimizer)
        if self.scaler is None and isinstance(inner, MasterWeights):
            return inner.clip_grad_norm_(max_norm, norm_type)
        if self.scaler is None:
            raise RuntimeError("clip_grad_norm_ requires a scaler, and this plugin has none: use fabric.clip_gradients")
        return self.scaler.clip_grad_norm_(inner, max_norm, norm_type)

    def _unwrapped(self, optimizer: Any) -> torch.optim.Optimizer:
        inner: torch.optim.Optimizer = (
            optimizer.optimizer if isinstance(optimizer, self._fabric_optimizer) else optimizer
        )
        return inner
