"""Wasserstein critic with gradient penalty (double backward) in mixed precision.

The gradients that make up the penalty are produced by a scaled backward pass,
so they are divided by the scale before the norm is taken, outside the scaler.
"""
import argparse
import hashlib

import torch
import torch.amp as amp
import torch.nn as nn

device = "cuda" if torch.cuda.is_available() else "cpu"


class Critic(nn.Module):
    def __init__(self, nc=2, width=32):
        super().__init__()
        self.fc1 = nn.Linear(nc, width)
        self.fc2 = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = nn.functional.softplus(self.fc1(x))
        h = nn.functional.softplus(self.fc2(h))
        return self.out(h).flatten()


class Generator(nn.Sequential):
    def __init__(self, nz=4, width=32, nc=2):
        super().__init__(nn.Linear(nz, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                         nn.Linear(width, nc))


def two_moons(n, generator):
    t = torch.rand(n, generator=generator) * torch.pi
    upper = torch.rand(n, generator=generator) < 0.5
    x = torch.where(upper, t.cos(), 1 - t.cos())
    y = torch.where(upper, t.sin(), 0.5 - t.sin())
    return torch.stack([x, y], 1) + 0.05 * torch.randn(n, 2, generator=generator)


def gradient_penalty(critic, real, fake, eps, scaler, dtype):
    mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
    with amp.autocast(device, dtype=dtype):
        score = critic(mixed).float().sum()
    scaled_grad, = torch.autograd.grad(scaler.scale(score), mixed, create_graph=True)
    inv_scale = 1.0 / scaler.get_scale()
    grad = scaled_grad * inv_scale
    with amp.autocast(device, dtype=dtype):
        norm = grad.square().sum(1).add(1e-12).sqrt()
        return (norm - 1).square().mean()


def critic_step(critic, gen, opt, scaler, real, cfg, dtype, rng):
    z = torch.randn(len(real), 4, generator=rng).to(device)
    eps = torch.rand(len(real), 1, generator=rng).to(device)
    opt.zero_grad(set_to_none=True)
    with torch.no_grad(), amp.autocast(device, dtype=dtype):
        fake = gen(z).float()
    with amp.autocast(device, dtype=dtype):
        loss = critic(fake).float().mean() - critic(real).float().mean()
    gp = gradient_penalty(critic, real, fake, eps, scaler, dtype)
    loss = loss + cfg.gp_weight * gp
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.detach(), gp.detach()


def generator_step(critic, gen, opt, scaler, n, dtype, rng):
    opt.zero_grad(set_to_none=True)
    with amp.autocast(device, dtype=dtype):
        loss = -critic(gen(torch.randn(n, 4, generator=rng).to(device))).float().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--critic-iters", type=int, default=2)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--gp-weight", type=float, default=5.0)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--init-scale", type=float, default=2.0 ** 14)
    ap.add_argument("--amp-dtype", choices=("fp16", "bf16"), default="fp16")
    ap.add_argument("--seed", type=int, default=11)
    cfg = ap.parse_args()

    dtype = torch.float16 if cfg.amp_dtype == "fp16" else torch.bfloat16
    torch.manual_seed(cfg.seed)
    rng = torch.Generator().manual_seed(cfg.seed + 1)
    critic, gen = Critic().to(device), Generator().to(device)
    opt_c = torch.optim.Adam(critic.parameters(), lr=cfg.lr, betas=(0.0, 0.9))
    opt_g = torch.optim.Adam(gen.parameters(), lr=cfg.lr, betas=(0.0, 0.9))
    fp16 = dtype == torch.float16
    # an update per backward pass, so the two networks cannot share a scaler
    scaler_c = amp.GradScaler(device, init_scale=cfg.init_scale, growth_interval=12, enabled=fp16)
    scaler_g = amp.GradScaler(device, init_scale=cfg.init_scale, growth_interval=12, enabled=fp16)

    for step in range(cfg.steps):
        for _ in range(cfg.critic_iters):
            real = two_moons(cfg.batch, rng).to(device)
            loss_c, gp = critic_step(critic, gen, opt_c, scaler_c, real, cfg, dtype, rng)
        loss_g = generator_step(critic, gen, opt_g, scaler_g, cfg.batch, dtype, rng)
        if step % 5 == 0 or step == cfg.steps - 1:
            print(f"step {step} critic loss {loss_c.item()!r} gp {gp.item()!r} gen loss {loss_g.item()!r} "
                  f"scales {scaler_c.get_scale()!r} {scaler_g.get_scale()!r}")

    sha = hashlib.sha256()
    for net in (critic, gen):
        for t in net.state_dict().values():
            sha.update(t.cpu().numpy().tobytes())
    print("weights", sha.hexdigest())


if __name__ == "__main__":
    main()
