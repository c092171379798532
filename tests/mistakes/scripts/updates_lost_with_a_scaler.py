import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for _ in range(4):
    loss = nn.functional.mse_loss(model(torch.randn(4, 8).bfloat16()).float(), torch.zeros(4, 1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # updates-lost
    scaler.update()
    optimizer.zero_grad()
