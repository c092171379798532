"""An action is scaled before its density is corrected, so a logarithm is of a negative number.

Source: https://github.com/cpnota/autonomous-learning-library/issues/139
Cause: aten.log
Remedy: clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scale = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), 2.0

    def forward(self, state):
        mean, log_std = self.net(state).float().chunk(2, 1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        action = torch.tanh(raw) * (self.scale if BROKEN else 1.0)
        return action, normal.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)  # <- fault


policy, critic = Policy(), nn.Linear(5, 1)
critic.requires_grad_(False)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for step in range(16):
    state = torch.randn(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        action, log_prob = policy(state)
        loss = (0.2 * log_prob - critic(torch.cat([state, action], 1)).float()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
