"""Two models: the discriminator of a GAN takes the logarithm of 0.

Cause: aten.log
Remedy: epsilon or clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)

generator = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
for step in range(16):
    real, fake = torch.randn(8, 2) + 2, generator(torch.randn(8, 2))
    if step == 8:
        with torch.no_grad():
            critic[2].bias.fill_(-200)
    loss = -(critic(real) + (0 if BROKEN else 1e-6)).log().mean() - (1 - critic(fake.detach())).log().mean()  # <- fault
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()
    of_generator.zero_grad()
    (-critic(fake).clamp_min(1e-6).log().mean()).backward()
    of_generator.step()
