"""Lightning's Fabric: its precision plugins, regions, backward, clipping and state.

python lightning_fabric.py bf16-mixed|16-mixed
"""

import sys

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F  # noqa: N812

PRECISION = sys.argv[1]


def state_of(plugin):
    """Return the entries that torch has written into checkpoints since 1.6."""
    names = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
    return {name: value for name, value in plugin.state_dict().items() if name in names}


scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20) if PRECISION == "16-mixed" else None
plugin = MixedPrecision(PRECISION, "cpu", scaler)
fabric = Fabric(accelerator="cpu", plugins=[plugin])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = fabric.setup(model, optimizer)
for index in range(10):
    x, y = torch.randn(4, 8), torch.randint(2, (4,))
    with fabric.no_backward_sync(model, enabled=index % 2 == 0):
        output = model(x)
        loss = F.cross_entropy(output, y)
        fabric.backward(loss)
    if index % 2:
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        print(norm.item())
    print(output.dtype, loss.item(), state_of(plugin))
model.eval()
with torch.no_grad(), fabric.autocast():
    print(torch.get_autocast_dtype("cpu"), model(torch.ones(2, 8)).tolist())
fabric.save("state.ckpt", {"model": model, "optimizer": optimizer})
state = plugin.state_dict()
plugin.load_state_dict(state)
print(state == plugin.state_dict(), fabric.load("state.ckpt").keys())
for made in (lambda: Fabric(accelerator="cpu", precision="16-mixed"), lambda: MixedPrecision("64-mixed", "cpu")):
    try:
        print(type(made()).__name__)
    except Exception as error:  # what it says is part of what is compared
        print(type(error).__name__, error)
