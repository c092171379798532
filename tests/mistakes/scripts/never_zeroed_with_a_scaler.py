import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for _ in range(6):
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(torch.randn(4, 8)).float(), torch.zeros(4, 1))
        scaler.scale(loss).backward()
    scaler.step(optimizer)  # never-zeroed
    scaler.update()
