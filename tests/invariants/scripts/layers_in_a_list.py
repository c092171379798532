# broken: not-in-optimizer
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = [nn.Linear(8, 8) for _ in range(2)]

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).relu()
        return x


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(24):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
