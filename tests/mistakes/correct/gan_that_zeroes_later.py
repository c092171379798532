import torch
from torch import nn

torch.manual_seed(0)
generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
of_generator = torch.optim.SGD(generator.parameters(), lr=1e-3)
of_critic = torch.optim.SGD(critic.parameters(), lr=1e-3)
for _ in range(6):
    of_critic.zero_grad(set_to_none=False)
    (critic(generator(torch.randn(2, 4)).detach()).mean() - critic(torch.randn(2, 4)).mean()).backward()
    of_critic.step()
    of_generator.zero_grad()
    (-critic(generator(torch.randn(2, 4))).mean()).backward()  # adds to the critic's gradients, which are zeroed later
    of_generator.step()
