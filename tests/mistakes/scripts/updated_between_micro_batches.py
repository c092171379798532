import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
other = nn.Linear(8, 1)
optimizer_of_other = torch.optim.SGD(other.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for i in range(8):
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), torch.zeros(4, 1)) / 4
        loss = loss + nn.functional.mse_loss(other(x), torch.zeros(4, 1))
    scaler.scale(loss).backward()
    if i % 4 == 3:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.step(optimizer_of_other)
    optimizer_of_other.zero_grad()
    scaler.update()  # updated-inside-accumulation
