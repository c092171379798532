"""`castwise.integrations.lightning` for scripts that `import pytorch_lightning`, which has its own classes."""

from __future__ import annotations

from castwise.integrations._lightning.fabric import FabricPrecision
from castwise.integrations._lightning.report import Report
from castwise.integrations._lightning.trainer import TrainerPrecision

try:
    import lightning_fabric.plugins.precision as of_fabric
    import pytorch_lightning as pl
    import pytorch_lightning.plugins.precision as of_trainer
    from lightning_fabric.wrappers import _FabricOptimizer
    from pytorch_lightning.core.optimizer import LightningOptimizer
except ImportError as error:
    raise ImportError(
        "castwise.integrations.pytorch_lightning needs pytorch_lightning: pip install 'castwise[lightning]'"
    ) from error

__all__ = ["FabricMixedPrecision", "MixedPrecision", "ReportCallback"]


# Of both of Lightning's, as in castwise.integrations.lightning: mypy compares the two.
class MixedPrecision(TrainerPrecision, of_trainer.MixedPrecision, of_trainer.FSDPPrecision):  # type: ignore[misc]
    """`castwise.integrations.lightning.MixedPrecision` for `pytorch_lightning.Trainer`.

    Args:
        precision: As there.
        device: As there.
        scaler: As there.
        policy: As there.
        weight_cache: As there.
    """

    _plain = of_trainer.Precision
    _lightning_module = pl.LightningModule
    _callback = pl.Callback
    _lightning_optimizer = LightningOptimizer


class FabricMixedPrecision(FabricPrecision, of_fabric.MixedPrecision, of_fabric.FSDPPrecision):  # type: ignore[misc]
    """`castwise.integrations.lightning.FabricMixedPrecision` for `lightning_fabric.Fabric`.

    Args:
        precision: As there.
        device: As there.
        scaler: As there.
    """

    _plain = of_fabric.Precision
    _fabric_optimizer = _FabricOptimizer


class ReportCallback(Report, pl.Callback):
    """`castwise.integrations.lightning.ReportCallback` for `pytorch_lightning.Trainer`.

    Args:
        folder: As there.
        every: As there.
        on_skip: As there.
    """
