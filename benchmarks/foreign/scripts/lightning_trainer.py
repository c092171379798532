"""Lightning's Trainer: precision plugins, clipping, accumulation, a closure optimizer, two optimizers by hand.

python lightning_trainer.py bf16-mixed|16-mixed
"""

import sys
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", module="lightning.*")
PRECISION = sys.argv[1]


def state_of(plugin):
    """Return the entries that torch has written into checkpoints since 1.6."""
    names = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
    return {name: value for name, value in plugin.state_dict().items() if name in names}


class Model(LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))
        self.kind = optimizer

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        output = self.net(batch[0])
        print("validation", output.dtype, F.cross_entropy(output, batch[1]).item())

    def configure_optimizers(self):
        return getattr(torch.optim, self.kind)(self.parameters(), lr=0.01)


class ByHand(Model):
    """Manual optimization with two optimizers, which share the plugin's scaler."""

    def __init__(self):
        super().__init__("SGD")
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = super().training_step(batch, index)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        halves = self.net[0].parameters(), self.net[3].parameters()
        return [torch.optim.SGD(half, lr=0.01, momentum=0.9) for half in halves]


def precision():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20) if PRECISION == "16-mixed" else None
    return MixedPrecision(PRECISION, "cpu", scaler)


def fit(name, model, **options):
    print(name)
    torch.manual_seed(0)
    batches = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(2, (32,))), batch_size=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "num_sanity_val_steps": 1}
    plugin = precision()
    trainer = Trainer(accelerator="cpu", max_epochs=1, plugins=[plugin], **quiet, **options)
    trainer.fit(model, batches, batches)
    print(trainer.precision_plugin.precision, trainer.global_step, state_of(plugin))
    print([p.double().sum().item() for p in model.parameters()])
    trainer.save_checkpoint("end.ckpt")
    print(sorted(torch.load("end.ckpt", weights_only=True)))
    print(sum(each.double().sum().item() for each in trainer.predict(model, batches) if isinstance(each, torch.Tensor)))


Model.predict_step = lambda self, batch, index: self.net(batch[0])
fit("AdamW", Model("AdamW"))
fit("clipped and accumulated", Model("SGD"), gradient_clip_val=0.1, accumulate_grad_batches=2)
fit("clipped by value", Model("Adam"), gradient_clip_val=0.01, gradient_clip_algorithm="value")
fit("by hand", ByHand())
try:
    fit("LBFGS", Model("LBFGS"))
except Exception as error:  # what it says is part of what is compared
    print(type(error).__name__, error)
