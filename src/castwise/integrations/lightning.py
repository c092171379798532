"""castwise in PyTorch Lightning: a plugin for `Trainer`, one for `Fabric`, and a callback that writes the report.

For scripts that `import lightning`. Those that `import pytorch_lightning`, which has other classes of the same names,
find the same in `castwise.integrations.pytorch_lightning`. Needs the extra `castwise[lightning]`.
"""

from __future__ import annotations

from castwise.integrations._lightning.fabric import FabricPrecision
from castwise.integrations._lightning.report import Report
from castwise.integrations._lightning.trainer import TrainerPrecision

try:
    import lightning.fabric.plugins.precision as of_fabric
    import lightning.pytorch as pl
    import lightning.pytorch.plugins.precision as of_trainer
    from lightning.fabric.wrappers import _FabricOptimizer
    from lightning.pytorch.core.optimizer import LightningOptimizer
except ImportError as error:
    raise ImportError("castwise.integrations.lightning needs Lightning: pip install 'castwise[lightning]'") from error

__all__ = ["FabricMixedPrecision", "MixedPrecision", "ReportCallback"]


# The plugins are instances of both of Lightning's, as strategies ask for the one or the other: mypy compares the two.
class MixedPrecision(TrainerPrecision, of_trainer.MixedPrecision, of_trainer.FSDPPrecision):  # type: ignore[misc]
    """Mixed precision of a `Trainer`, instead of its `precision` and with any strategy that splits by torch:

    ```python
    trainer = lightning.Trainer(plugins=MixedPrecision("16-mixed", "cuda"), gradient_clip_val=1.0)
    ```

    Forwards run in `castwise.autocast`, losses are scaled by a castwise scaler. Results are bit for bit those of
    Lightning's own plugin or, with clipping by the norm, equal up to roundings of the norm. Either plugin loads the
    other's checkpoints.

    Gradients are clipped by the scaler, in its one read of them, and those of fused optimizers can be, too. Hooks and
    an overridden `configure_gradient_clipping` see them unscaled, which takes one pass more if there are any.
    `torch.optim.LBFGS` works. A batch without a loss (`training_step` returned None) calls no hooks of a step.

    With manual optimization the scale is moved after each step if no gradients of other parameters are there, and
    otherwise before the next backward: optimizers whose backwards all come before their steps share a scale.

    Args:
        precision: `"16-mixed"` for fp16, `"bf16-mixed"` for bf16.
        device: Type of device of the model: `"cuda"`, `"cpu"`, ...
        scaler: The one to use. Without one there is none in bf16, and in fp16 a `castwise.GradScaler(device)`, or if a
            strategy has split the model over ranks (FSDP, tensor parallelism) a `castwise.ShardedGradScaler(device)`.
            It is made when it is first asked for. One with `schedules.Guard()` skips steps that are not finite in bf16.
        policy: Which module runs in which precision; it is bound to the `LightningModule` when that is set up.
        weight_cache: Keep casts of weights until they change (see `castwise.WeightCache`), rather than for one use.

    Raises:
        TypeError: `scaler` or `policy` is not one of castwise's, or the policy is bound already.
        ValueError: `precision` is another one, or not the policy's.
        RuntimeError: In `fit`, if the model is split over ranks and `scaler` does not let them agree on their steps.
    """

    _plain = of_trainer.Precision
    _lightning_module = pl.LightningModule
    _callback = pl.Callback
    _lightning_optimizer = LightningOptimizer


class FabricMixedPrecision(FabricPrecision, of_fabric.MixedPrecision, of_fabric.FSDPPrecision):  # type: ignore[misc]
    """Mixed precision of a `Fabric`, instead of its `precision` and with any strategy that splits by torch:

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

    Results are bit for bit those of Lightning's own plugin. As there, models are given their arguments
    in the low precision, and return fp32; optimizers may be stepped with a closure. When the scale is moved is said in
    `MixedPrecision`; `update_if_due()` does it before the next backward does.

    `fabric.clip_gradients` works, in three passes over the gradients and with an error if they overflow, unless it is
    given `error_if_nonfinite=False`; `clip_grad_norm_` takes one, and lets the step be skipped.

    Args:
        precision: `"16-mixed"` for fp16, `"bf16-mixed"` for bf16.
        device: Type of device of the model: `"cuda"`, `"cpu"`, ...
        scaler: As for `MixedPrecision`.

    Raises:
        TypeError: `scaler` is not one of castwise's.
        ValueError: `precision` is another one.
        RuntimeError: In a backward, if a model is split over ranks and `scaler` does not let them agree on their steps.
    """

    _plain = of_fabric.Precision
    _fabric_optimizer = _FabricOptimizer


class ReportCallback(Report, pl.Callback):
    """Monitors a run from its first step to its last, and writes the report, also if it fails or is stopped:

    ```python
    trainer = lightning.Trainer(plugins=MixedPrecision("16-mixed", "cuda"), callbacks=[ReportCallback("run")])
    ```

    `run/monitor.jsonl` is the record that a `castwise.Monitor` writes, `run/report.html` the page of `castwise report`.
    A resumed run continues in the same record. The first rank writes. If the page cannot be written there is a warning;
    it needs the extra `castwise[report]`.

    Args:
        folder: Where to write.
        every: Steps from one sample to the next, >= 1.
        on_skip: `"diagnose"` finds the op that a skipped step's first inf or NaN comes from, if `training_step` calls
            the module itself, `self(x)`; see `castwise.Monitor`.

    Raises:
        TypeError: In `fit`, if the Trainer's scaler is torch's: Lightning's own plugin for fp16 has one.
        ValueError: In `fit`, if `every` or `on_skip` is out of its range, or skipped steps of a model that is split
            over ranks are to be diagnosed.
    """
