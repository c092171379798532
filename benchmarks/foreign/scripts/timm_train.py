"""timm's own parts, put together as its train.py does: optimizer factory, NativeScaler, adaptive clipping, EMA.

python timm_train.py MODEL bfloat16|float16
"""

import sys
from functools import partial

import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models import create_model, model_parameters
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, NativeScaler

name, dtype = sys.argv[1], getattr(torch, sys.argv[2])
model = create_model(name, num_classes=5, drop_path_rate=0.1, img_size=32) if "vit" in name else create_model(name)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=2, warmup_epochs=1)
amp_autocast = partial(torch.autocast, device_type="cpu", dtype=dtype)
loss_scaler = NativeScaler(device="cpu")
ema = ModelEmaV3(model, decay=0.9)
mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=model.num_classes)
criterion = SoftTargetCrossEntropy()


@torch.no_grad()
def validate(evaluated):
    evaluated.eval()
    with amp_autocast():
        output = evaluated(torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32))
    print(output.dtype, output.float().sum().item(), output.float().std().item())


for epoch in range(2):
    model.train()
    for batch in range(4):
        images, labels = mixup(torch.randn(4, 3, 32, 32), torch.randint(model.num_classes, (4,)))
        with amp_autocast():
            loss = criterion(model(images), labels)
            loss = loss / 2
        loss_scaler(
            loss,
            optimizer,
            clip_grad=0.02,
            clip_mode="agc",
            parameters=model_parameters(model, exclude_head=True),
            need_update=batch % 2 == 1,
        )
        if batch % 2 == 1:
            optimizer.zero_grad()
            ema.update(model, step=epoch * 4 + batch)
        print(loss.item(), loss_scaler.state_dict()["scale"])
    validate(model)
    validate(ema.module)
    scheduler.step(epoch + 1)
