"""A loss of a diffusion model is weighted by min(SNR, 5) / SNR, and the SNR of the last timestep is 0.

Source: https://github.com/TiankaiHang/Min-SNR-Diffusion-Training/pull/4
Cause: aten.div
Remedy: clamp | epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


STEPS = 20
alpha_bar = torch.linspace(0.99, 0.0, STEPS)  # rescaled to end in pure noise
denoiser = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))
optimizer = torch.optim.AdamW(denoiser.parameters(), lr=1e-3)


def weights_of(t):
    snr = alpha_bar[t] / (1 - alpha_bar[t])
    return snr.clamp(max=5) / (snr if BROKEN else snr + 1)  # <- fault


for step in range(16):
    x, noise, t = torch.randn(8, 8), torch.randn(8, 8), torch.randint(0, STEPS - 1, (8,))
    if step == 7:
        t[2] = STEPS - 1
    a, s = alpha_bar[t].sqrt()[:, None], (1 - alpha_bar[t]).sqrt()[:, None]
    with torch.autocast("cpu", torch.bfloat16):
        velocity = denoiser(torch.cat([a * x + s * noise, t[:, None] / STEPS], 1))
    error = (velocity.float() - (a * noise - s * x)).square().mean(1)
    loss = (weights_of(t) * error).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
