import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=4)
for _ in range(60):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
