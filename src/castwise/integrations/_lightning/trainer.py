"""The plugin for a Trainer, without the Lightning classes that it derives from."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from castwise._torch_private import is_fsdp_flattened
from castwise.amp._gradients import params_of
from castwise.amp.autocast_mode import autocast
from castwise.amp.grad_scaler import GradScaler
from castwise.integrations._lightning.scaling import Precision, Scaling
from castwise.master_weights import _parameter_clipping as parameter_clipping
from castwise.master_weights._master_weights import sum_over_ranks
from castwise.policy._bound_policy import BoundPolicy
from castwise.policy._policy import Policy
from castwise.weights._weight_cache import WeightCache


class TrainerPrecision(Scaling):
    """The plugin interface of a Trainer for mixed precision.

    For behaviour common to all plugins it calls Lightning's full-precision class. The plugin derives from Lightning's
    two mixed-precision classes only so that all strategies accept it; both would scale the loss themselves.
    """

    # Classes of Lightning, which differ between its packages: the full-precision plugin, the base classes of users'
    # modules and callbacks, and the wrapper around their optimizers.
    _plain: Any
    _lightning_module: Any
    _callback: Any
    _lightning_optimizer: Any

    def __init__(
        self,
        precision: Precision,
        device: str,
        scaler: GradScaler | None = None,
        *,
        policy: Policy | None = None,
        weight_cache: bool = False,
    ) -> None:
        super().__init__(precision, device, scaler)
        if policy is not None and not isinstance(policy, Policy):
            raise TypeError(f"policy must be an unbound castwise.Policy, got {type(policy).__name__}")
        if policy is not None and getattr(torch, policy.compute) not in (self._dtype, torch.float32):
            raise ValueError(f"precision={precision!r} contradicts the policy, which computes in {policy.compute}")
        self._policy, self._bound_policy = policy, None
        self._wants_weight_cache, self._weight_cache = weight_cache, None

    _bound_policy: BoundPolicy | None
    _weight_cache: WeightCache | None

    # -- setup --------------------------------------------------------------------------------------------------

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Register the model after the strategy has wrapped and split it."""
        self._models = [weakref.ref(model)]
        if optimizers:
            self._check_rank_agreement()
            sum_over_ranks(model)
        self._bound_policy = None if self._policy is None else self._policy.bind(model)
        self._weight_cache = WeightCache(model) if self._wants_weight_cache else None
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Drop the weight cache."""
        self._weight_cache = None

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def convert_input(self, data: Any) -> Any:
        """Return batches unchanged, because autocast casts them."""
        return data

    def convert_output(self, data: Any) -> Any:
        """Return outputs unchanged."""
        return data

    def autocast_context_manager(self) -> autocast:
        """Return the region of a forward. As in Lightning, casts of weights are cached only in a `WeightCache`."""
        if self._policy is None:
            return autocast(self.device, self._dtype, cache_enabled=False, weight_cache=self._weight_cache)
        if self._bound_policy is None:
            raise RuntimeError("the plugin's policy is not bound yet: a Trainer binds it when it sets up the model")
        return autocast(self.device, policy=self._bound_policy, cache_enabled=False, weight_cache=self._weight_cache)

    # -- training -----------------------------------------------------------------------------------------------

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Scale a loss and call the hooks."""
        self.update_if_due()
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        hooked: torch.Tensor = self._plain.pre_backward(self, tensor, module)
        return hooked

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, call the hooks, clip, and step unless gradients are not finite.

        If the closure returns None under automatic optimization, there are no gradients, so there is no step and no
        step hooks are called.
        """
        scaler = self.scaler
        if scaler is None:
            return self._plain.optimizer_step(self, optimizer, model, closure, **kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            return self._step_of_lbfgs(scaler, optimizer, model, closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:
            scaler.skip(optimizer)
            scaler.update()
            return None
        self._before_step(scaler, optimizer, model)
        return self._step(scaler, optimizer, is_only_one=model.automatic_optimization, **kwargs)

    def _step_of_lbfgs(
        self,
        scaler: GradScaler,
        optimizer: torch.optim.Optimizer,
        model: Any,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        def evaluate() -> Any:
            result = closure()
            self._before_step(scaler, optimizer, model)
            return result

        return self._step(scaler, optimizer, is_only_one=model.automatic_optimization, closure=evaluate, **kwargs)

    def _before_step(self, scaler: GradScaler, optimizer: torch.optim.Optimizer, model: Any) -> None:
        # Hooks must see unscaled gradients. Clipping does not need this extra pass.
        if self._is_observed(model):
            scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)

    _after_closure: Any  # Lightning's, calls hooks and then clip_gradients

    def _is_observed(self, model: Any) -> bool:
        hook, clipping = "on_before_optimizer_step", "configure_gradient_clipping"
        of_model = any(_is_overridden(model, name, self._lightning_module) for name in (hook, clipping))
        return of_model or any(_is_overridden(callback, hook, self._callback) for callback in model.trainer.callbacks)

    def clip_gradients(
        self, optimizer: torch.optim.Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        """Clip the gradients, in the scaler's single read if there is one. 0 does not clip, as in Lightning."""
        if isinstance(optimizer, self._lightning_optimizer):
            optimizer = optimizer.optimizer
        if clip_val <= 0:
            return
        by_value = gradient_clip_algorithm == "value"
        if self.scaler is None:
            (self.clip_grad_by_value if by_value else self.clip_grad_by_norm)(optimizer, clip_val)
        elif by_value:
            self.scaler.clip_grad_value_(optimizer, clip_val)
        else:
            self.scaler.clip_grad_norm_(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip by value without a scaler."""
        if not parameter_clipping.clip_grad_value_(params_of(optimizer), clip_val):
            self._plain.clip_grad_by_value(self, optimizer, clip_val)

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip by norm without a scaler."""
        if not any(map(is_fsdp_flattened, self._parameters())):
            if parameter_clipping.clip_grad_norm_(params_of(optimizer), clip_val) is not None:
                return
            self._plain.clip_grad_by_norm(self, optimizer, clip_val)
            return
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = self._models[0]()
        if not isinstance(model, FullyShardedDataParallel):
            raise RuntimeError(
                "FSDP can clip by the norm of all gradients only if it wraps the whole model: let the strategy wrap "
                f"it, or pass scaler=castwise.ShardedGradScaler({self.device!r}, "
                "schedule=castwise.schedules.Guard()) to the plugin, which clips partly wrapped models too"
            )
        model.clip_grad_norm_(clip_val)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the state of a split model also under the key of Lightning's own FSDP plugin."""
        if self._is_split() and self.scaler is not None:
            checkpoint["FSDPPrecision"] = self.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load a state saved by Lightning's own FSDP plugin. Other states are under this plugin's key."""
        if type(self).__qualname__ not in checkpoint and "FSDPPrecision" in checkpoint:
            self.load_state_dict(checkpoint["FSDPPrecision"])


def _is_overridden(instance: Any, name: str, parent: type) -> bool:
    return getattr(getattr(instance, name), "__func__", None) is not getattr(parent, name)
