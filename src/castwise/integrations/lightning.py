"""PyTorch Lightning: a precision plugin for `Trainer`, one for `Fabric`, and a callback that writes the report.

For scripts that `import lightning`. Scripts that `import pytorch_lightning`, which has separate classes with the same
names, use `castwise.integrations.pytorch_lightning` instead. Requires the extra `castwise[lightning]`.
"""

from __future__ import annotations

from castwise.integrations._lightning.fabric import FabricPrecision
from castwise.integrations._lightning.report_callback import Report
from castwise.integrations._lightning.trainer import TrainerPrecision

try:
    import lightning.fabric.plugins.precision as of_fabric
    import lightning.pytorch as pl
    import lightning.pytorch.plugins.precision as of_trainer
    from lightning.fabric.strategies.strategy import Strategy
    from lightning.fabric.wrappers import _FabricOptimizer
    from lightning.pytorch.core.optimizer import LightningOptimizer
except ImportError as error:
    raise ImportError("castwise.integrations.lightning needs Lightning: pip install 'castwise[lightning]'") from error

__all__ = ["FabricMixedPrecision", "MixedPrecision", "ReportCallback"]


# Strategies check for one or the other of Lightning's plugins, so these derive from both, which mypy rejects.
class MixedPrecision(TrainerPrecision, of_trainer.MixedPrecision, of_trainer.FSDPPrecision):  # type: ignore[misc]
    """Mixed precision for a `Trainer`, instead of its `precision`, with any strategy based on torch's parallelism:

    ```python
    trainer = lightning.Trainer(plugins=MixedPrecision("16-mixed", "cuda"), gradient_clip_val=1.0)
    ```

    Forwards run in `castwise.autocast`, and a castwise scaler scales the losses. Results are bitwise identical to those
    of Lightning's own plugin or, with clipping by norm, equal up to rounding of the norm. Each plugin loads the other's
    checkpoints.

    The scaler clips gradients as part of its single read, including those of fused optimizers. Hooks and an overridden
    `configure_gradient_clipping` see unscaled gradients; using either costs another pass over them.
    `torch.optim.LBFGS` works. A batch without a loss (`training_step` returned None) calls no step hooks.

    With manual optimization, the scale is updated after each step if no other parameters have gradients, and otherwise
    before the next backward, so optimizers whose backwards all come before their steps share a scale.

    Args:
        precision: `"16-mixed"` for fp16, `"bf16-mixed"` for bf16.
        device: Device type of the model: `"cuda"`, `"cpu"`, ...
        scaler: The scaler to use. By default there is none in bf16. In fp16 the default is a
            `castwise.GradScaler(device)`, or a `castwise.ShardedGradScaler(device)` if a strategy has split the model
            over ranks (FSDP, tensor parallelism), created on first use. A scaler with `schedules.Guard()` skips
            non-finite steps in bf16.
        policy: The precision of each module; bound to the `LightningModule` when that is set up.
        weight_cache: Keep casts of weights until the weights change (see `castwise.WeightCache`), instead of casting
            for each use.

    Raises:
        TypeError: `scaler` or `policy` is not a castwise object, or the policy is already bound.
        ValueError: `precision` is invalid, or differs from that of the policy.
        RuntimeError: In `fit`, if the model is split over ranks and `scaler` does not synchronize their steps.
    """

    _plain = of_trainer.Precision
    _lightning_module = pl.LightningModule
    _callback = pl.Callback
    _lightning_optimizer = LightningOptimizer


class FabricMixedPrecision(FabricPrecision, of_fabric.MixedPrecision, of_fabric.FSDPPrecision):  # type: ignore[misc]
    """Mixed precision for a `Fabric`, instead of its `precision`, with any strategy based on torch's parallelism:

    ```python
    precision = FabricMixedPrecision("16-mixed", "cuda")
    fabric = lightning.Fabric(plugins=precision)
    model, optimizer = fabric.setup(model, optimizer)
    for x, y in batches:
        fabric.backward(loss_fn(model(x), y))
        precision.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(path, {"model": model, "optimizer": optimizer, "precision": precision})
    ```

    Results are bitwise identical to those of Lightning's own plugin. As with that plugin, models receive their
    arguments in low precision and return fp32, and optimizers may step with a closure. The scale is updated as with
    `MixedPrecision`; `update_if_due()` updates it at once.

    `fabric.clip_gradients` works too. It makes three passes over the gradients, and raises if they overflow, unless
    called with `error_if_nonfinite=False`. `clip_grad_norm_` makes one pass, and an overflow skips the step.

    Args:
        precision: `"16-mixed"` for fp16, `"bf16-mixed"` for bf16.
        device: Device type of the model: `"cuda"`, `"cpu"`, ...
        scaler: See `MixedPrecision`.

    Raises:
        TypeError: `scaler` is not a castwise scaler.
        ValueError: `precision` is invalid.
        RuntimeError: In a backward, if a model is split over ranks and `scaler` does not synchronize their steps.
    """

    _plain = of_fabric.Precision
    _fabric_optimizer = _FabricOptimizer
    _strategy = Strategy


class ReportCallback(Report, pl.Callback):
    """Monitors a run from its first to its last step and writes the report, even if the run fails or is stopped:

    ```python
    trainer = lightning.Trainer(plugins=MixedPrecision("16-mixed", "cuda"), callbacks=[ReportCallback("run")])
    ```

    A `castwise.Monitor` writes its records to `run/monitor.jsonl.gz`, and the report goes to `run/report.html`. A
    resumed run continues the same file. Only the first rank writes. The report requires the extra `castwise[report]`;
    if it cannot be written, there is a warning.

    Args:
        folder: Folder for the records and the report.
        every: Steps between two samples, >= 1.
        on_nonfinite: `"diagnose"` finds the op that made a step's first inf or NaN, if `training_step` calls the module
            itself, `self(x)`; see `castwise.Monitor`.
        snapshots: Whether to keep weights of earlier steps for that, which in bf16 on an accelerator needs them.

    Raises:
        TypeError: In `fit`, if the Trainer has a torch scaler, as with Lightning's own plugin for fp16.
        ValueError: In `fit`, if `every` or `on_nonfinite` is out of range, or if `on_nonfinite` is set and the model is
            split over ranks.
    """
