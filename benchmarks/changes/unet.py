"""A diffusion U-Net on random images: noise levels, embedded times, skip connections, weighted squared errors."""

import math

import torch
from torch import nn
from torch.nn import functional as F

DTYPE = torch.float32
WIDTH, SIZE, BATCH, TIMES = 8, 8, 8, 100


def embedded(times, width=16):
    rates = torch.exp(-math.log(1000.0) * torch.arange(width // 2) / (width // 2))
    angles = times.float().unsqueeze(-1) * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class Stage(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm = nn.GroupNorm(2, inputs)
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.of_time = nn.Linear(16, 2 * outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x, time):
        scale, shift = self.of_time(time).unsqueeze(-1).unsqueeze(-1).chunk(2, 1)
        out = self.conv(F.silu(self.norm(x)))
        return F.silu(out * (1 + scale) + shift) + self.skip(x)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.first = nn.Conv2d(2, WIDTH, 3, padding=1)
        self.down = Stage(WIDTH, 2 * WIDTH)
        self.middle = Stage(2 * WIDTH, 2 * WIDTH)
        self.up = Stage(3 * WIDTH, WIDTH)
        self.last = nn.Conv2d(WIDTH, 2, 3, padding=1)

    def forward(self, x, times):
        time = self.time(embedded(times))
        high = self.first(x)
        low = self.middle(self.down(F.avg_pool2d(high, 2), time), time)
        wide = F.interpolate(low.float(), scale_factor=2, mode="bilinear").to(high.dtype)
        return self.last(self.up(torch.cat([wide, high], 1), time))


def train(probe):
    torch.manual_seed(0)
    model = UNet()
    nn.init.normal_(model.last.weight, std=0.05)
    betas = torch.linspace(1e-3, 0.05, TIMES)
    kept = torch.cumprod(1 - betas, 0)
    images = torch.randn(3, BATCH, 2, SIZE, SIZE)
    averaged = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.02, amsgrad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=DTYPE is torch.float16)
    losses = []
    for step, clean in enumerate(images):
        times, noise = torch.randint(0, TIMES, (BATCH,)), torch.randn_like(clean)
        level = kept[times].view(-1, 1, 1, 1)
        noisy = level.sqrt() * clean + (1 - level).sqrt() * noise
        with torch.autocast("cpu", dtype=DTYPE, enabled=DTYPE is not torch.float32):
            predicted = model(noisy, times)
        errors = (predicted.float() - noise).square().mean((1, 2, 3))
        weights = (kept[times] / (1 - kept[times])).clamp(max=5.0)
        loss = (weights * errors).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        decay = min(0.99, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, param in model.named_parameters():
                averaged[name].mul_(decay).add_(param, alpha=1 - decay)
        probe("averaged", averaged["first.weight"])
        losses.append(loss.item())
    return model, losses
