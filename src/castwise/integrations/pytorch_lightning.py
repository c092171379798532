"""`castwise.integrations.lightning` for scripts that `import pytorch_lightning`, which has separate classes."""

from __future__ import annotations

from castwise.integrations._lightning.fabric import FabricPrecision
from castwise.integrations._lightning.report_callback import Report
from castwise.integrations._lightning.trainer import TrainerPrecision

try:
    import lightning_fabric.plugins.precision as of_fabric
    import pytorch_lightning as pl
    import pytorch_lightning.plugins.precision as of_trainer
    from lightning_fabric.strategies.strategy import Strategy
    from lightning_fabric.wrappers import _FabricOptimizer
    from pytorch_lightning.core.optimizer import LightningOptimizer
except ImportError as error:
    raise ImportError(
        "castwise.integrations.pytorch_lightning needs pytorch_lightning: pip install 'castwise[lightning]'"
    ) from error

__all__ = ["FabricMixedPrecision", "MixedPrecision", "ReportCallback"]


# Derives from both of Lightning's plugins, as in castwise.integrations.lightning, which mypy rejects.
class MixedPrecision(TrainerPrecision, of_trainer.MixedPrecision, of_trainer.FSDPPrecision):  # type: ignore[misc]
    """`castwise.integrations.lightning.MixedPrecision` for `pytorch_lightning.Trainer`.

    Args:
        precision: As in `castwise.integrations.lightning.MixedPrecision`.
        device: As in `castwise.integrations.lightning.MixedPrecision`.
        scaler: As in `castwise.integrations.lightning.MixedPrecision`.
        policy: As in `castwise.integrations.lightning.MixedPrecision`.
        weight_cache: As in `castwise.integrations.lightning.MixedPrecision`.
    """

    _plain = of_trainer.Precision
    _lightning_module = pl.LightningModule
    _callback = pl.Callback
    _lightning_optimizer = LightningOptimizer


class FabricMixedPrecision(FabricPrecision, of_fabric.MixedPrecision, of_fabric.FSDPPrecision):  # type: ignore[misc]
    """`castwise.integrations.lightning.FabricMixedPrecision` for `lightning_fabric.Fabric`.

    Args:
        precision: As in `castwise.integrations.lightning.FabricMixedPrecision`.
        device: As in `castwise.integrations.lightning.FabricMixedPrecision`.
        scaler: As in `castwise.integrations.lightning.FabricMixedPrecision`.
    """

    _plain = of_fabric.Precision
    _fabric_optimizer = _FabricOptimizer
    _strategy = Strategy


class ReportCallback(Report, pl.Callback):
    """`castwise.integrations.lightning.ReportCallback` for `pytorch_lightning.Trainer`.

    Args:
        folder: As in `castwise.integrations.lightning.ReportCallback`.
        every: As in `castwise.integrations.lightning.ReportCallback`.
        on_nonfinite: As in `castwise.integrations.lightning.ReportCallback`.
        snapshots: As in `castwise.integrations.lightning.ReportCallback`.
    """
