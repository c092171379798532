"""A small spectrally normalised GAN on a ring of Gaussians, mixed precision.

Generator and discriminator have an optimizer and a gradient scaler each.
"""
import argparse
import hashlib
import math

import torch
import torch.nn as nn
from torch.nn.utils.parametrizations import spectral_norm

if torch.cuda.is_available():
    from torch.cuda.amp import GradScaler, autocast
else:
    from torch.cpu.amp import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"


def sample_ring(n, modes=8, radius=2.0, std=0.05):
    theta = torch.randint(modes, (n,)) * (2 * math.pi / modes)
    points = torch.stack([theta.cos(), theta.sin()], dim=1) * radius
    return points + std * torch.randn(n, 2)


class Generator(nn.Module):
    def __init__(self, nz, nh):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(nz, nh), nn.BatchNorm1d(nh), nn.ReLU(inplace=True),
            nn.Linear(nh, nh), nn.BatchNorm1d(nh), nn.ReLU(inplace=True),
            nn.Linear(nh, 2),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self, nh):
        super().__init__()
        self.main = nn.Sequential(
            spectral_norm(nn.Linear(2, nh)), nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(nh, nh)), nn.LeakyReLU(0.2),
            nn.Linear(nh, 1),
        )

    def forward(self, x):
        return self.main(x).squeeze(1)


def weights_sha(*nets):
    sha = hashlib.sha256()
    for net in nets:
        for v in net.state_dict().values():
            sha.update(v.detach().cpu().numpy().tobytes())
    return sha.hexdigest()


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch-size", type=int, default=48)
parser.add_argument("--nz", type=int, default=8)
parser.add_argument("--nh", type=int, default=32)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--amp-dtype", choices=["fp16", "bf16"], default="fp16")
parser.add_argument("--seed", type=int, default=7)


def main(opt):
    torch.manual_seed(opt.seed)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[opt.amp_dtype]
    use_scaler = dtype == torch.float16

    netG = Generator(opt.nz, opt.nh).to(device)
    netD = Discriminator(opt.nh).to(device)
    criterion = nn.BCEWithLogitsLoss()
    optimizerG = torch.optim.Adam(netG.parameters(), lr=opt.lr, betas=(0.5, 0.999))
    optimizerD = torch.optim.Adam(netD.parameters(), lr=opt.lr, betas=(0.5, 0.999))
    scalerG = GradScaler(growth_interval=20, enabled=use_scaler)
    scalerD = GradScaler(growth_interval=25, enabled=use_scaler)

    ones = torch.ones(opt.batch_size, device=device)
    zeros = torch.zeros(opt.batch_size, device=device)

    for i in range(1, opt.steps + 1):
        # (1) discriminator: real and fake batches are backpropagated apart
        real = sample_ring(opt.batch_size).to(device)
        noise = torch.randn(opt.batch_size, opt.nz).to(device)
        optimizerD.zero_grad()
        with autocast(dtype=dtype):
            errD_real = criterion(netD(real), 0.9 * ones)
        scalerD.scale(errD_real).backward()
        with autocast(dtype=dtype):
            fake = netG(noise)
            errD_fake = criterion(netD(fake.detach()), zeros)
        scalerD.scale(errD_fake).backward()
        scalerD.step(optimizerD)
        scalerD.update()

        # (2) generator
        for p in netD.parameters():
            p.requires_grad_(False)
        optimizerG.zero_grad()
        with autocast(dtype=dtype):
            errG = criterion(netD(fake), ones)
        scalerG.scale(errG).backward()
        scalerG.step(optimizerG)
        scalerG.update()
        for p in netD.parameters():
            p.requires_grad_(True)

        if i % 10 == 0:
            print(f"[{i}/{opt.steps}] loss_D {(errD_real + errD_fake).item()!r} loss_G {errG.item()!r} "
                  f"scale_D {scalerD.get_scale()!r} scale_G {scalerG.get_scale()!r}")

    netG.eval()
    with torch.no_grad(), autocast(dtype=dtype):
        out = netG(torch.randn(128, opt.nz).to(device)).float()
    print(f"mean radius {out.norm(dim=1).mean().item()!r}")
    print("weights", weights_sha(netG, netD))


if __name__ == "__main__":
    main(parser.parse_args())
