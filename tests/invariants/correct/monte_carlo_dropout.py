import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(4):
    model.train()
    for _ in range(8):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    model[1].train()
    with torch.no_grad():
        for _ in range(8):
            model(torch.ones(4, 8))
