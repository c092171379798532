import torch
from torch import nn

model = nn.ModuleDict({"generator": nn.Linear(4, 8), "critic": nn.Linear(8, 1)})
of_generator = torch.optim.Adam(model["generator"].parameters(), lr=1e-3)
of_critic = torch.optim.Adam(model["critic"].parameters(), lr=1e-3)
for _ in range(24):
    model["critic"](model["generator"](torch.randn(4, 4))).mean().backward()
    of_critic.step()
    model.zero_grad()
    (-model["critic"](model["generator"](torch.randn(4, 4))).mean()).backward()
    of_generator.step()
    model.zero_grad()
