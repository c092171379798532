import torch
from torch import nn

generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
for step in range(60):
    of_critic.zero_grad()
    (critic(generator(torch.randn(4, 4)).detach()).mean() - critic(torch.randn(4, 8)).mean()).backward()
    of_critic.step()
    if step % 5 == 4:
        of_generator.zero_grad()
        (-critic(generator(torch.randn(4, 4))).mean()).backward()
        of_generator.step()
