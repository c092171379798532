import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    for _ in range(8):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)
    torch.optim.swa_utils.update_bn([torch.randn(4, 8) for _ in range(4)], model)
