"""A UNet of diffusers trained to remove noise, with diffusers' EMA of its weights, which is evaluated in between.

python diffusers_ema.py bfloat16|float16 [--no-ema]
"""

import sys

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel, compute_snr
from torch.nn import functional as F  # noqa: N812

torch.manual_seed(0)
blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
model = UNet2DModel(sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, **blocks)
ema = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)
noise_scheduler = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
region = torch.autocast("cpu", dtype=getattr(torch, sys.argv[1]))


@torch.no_grad()
def sample(when):
    model.eval()
    generator, image = torch.Generator().manual_seed(1), torch.linspace(-2, 2, 192).view(1, 3, 8, 8)
    noise_scheduler.set_timesteps(3)
    for t in noise_scheduler.timesteps:
        with region:
            noise = model(image, t).sample
        image = noise_scheduler.step(noise, t, image, generator=generator).prev_sample
    print(when, noise.dtype, image.double().sum().item())
    model.train()


for _ in range(4):
    images, noise, t = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8), torch.randint(100, (2,))
    with region:
        predicted = model(noise_scheduler.add_noise(images, noise, t), t).sample
        loss = F.mse_loss(predicted.float(), noise, reduction="none").mean(dim=(1, 2, 3))
        loss = (loss * compute_snr(noise_scheduler, t).clamp(max=5.0)).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(loss.item(), norm.item(), scaler.get_scale())
    sample("trained")
    if "--no-ema" not in sys.argv:
        ema.step(model.parameters())
        ema.store(model.parameters())
        ema.copy_to(model.parameters())
        sample("averaged")
        ema.restore(model.parameters())
        sample("restored")
