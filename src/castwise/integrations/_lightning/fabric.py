"""The plugin of Fabric, without the classes of Lightning that it derives from."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from castwise.amp.autocast_mode import autocast
from castwise.amp.grad_scaler import GradScaler
from castwise.integrations._lightning.scaling import Precision, Scaling


class FabricPrecision(Scaling):
    """What Fabric asks of a plugin; like `TrainerPrecision` it never goes to Lightning's own for mixed precision."""

    _plain: Any  # Lightning's plugin for no precision, another one in each of its packages
    _fabric_optimizer: Any  # what is given to users instead of their optimizers

    def __init__(self, precision: Precision, device: str, scaler: GradScaler | None = None) -> None:
        super().__init__(precision, device, scaler)
        self._desired_input_dtype = self._dtype  # Lightning's, which casts what a model is given
        self._are_ranks_checked = False

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Take note of a model that is set up; it is split over ranks only after this."""
        self._models = [*(reference for reference in self._models if reference() is not None), weakref.ref(module)]
        self._are_ranks_checked = False
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Make tensors as everywhere."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Make modules as everywhere."""
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the region of a forward."""
        return autocast(self.device, self._dtype)

    def backward(self, tensor: torch.Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale a loss and go back from it."""
        if not self._are_ranks_checked:
            self._refuse_ranks_that_may_disagree()
            self._are_ranks_checked = True
        self.update_if_due()
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        self._plain.backward(self, tensor, model, *args, **kwargs)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Step, unless the gradients are not finite."""
        if self.scaler is None:
            return self._plain.optimizer_step(self, optimizer, **kwargs)
        return self._step(self.scaler, optimizer, is_only_one=False, **kwargs)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale gradients for `fabric.clip_gradients`, which reads them again."""
        if self.scaler is not None:
            self.scaler.unscale_(self._unwrapped(optimizer))

    def clip_grad_norm_(
        self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip the gradients of an optimizer to a norm in one read, instead of `fabric.clip_gradients`.

        Gradients that are not finite are left as they are: the step is skipped.

        Args:
            optimizer: All gradients of its parameters count as one vector.
            max_norm: The largest norm they may have, >= 0; inf only measures.
            norm_type: p of the p-norm, > 0, or inf.

        Returns:
            The norm of the unscaled gradients before clipping, shape ().

        Raises:
            RuntimeError: There is no scaler, so that nothing is scaled: `fabric.clip_gradients` does it as well.
        """
        if self.scaler is None:
            raise RuntimeError("without a scaler there is nothing to save by one read: use fabric.clip_gradients")
        return self.scaler.clip_grad_norm_(self._unwrapped(optimizer), max_norm, norm_type)

    def _unwrapped(self, optimizer: Any) -> torch.optim.Optimizer:
        inner: torch.optim.Optimizer = (
            optimizer.optimizer if isinstance(optimizer, self._fabric_optimizer) else optimizer
        )
        return inner
