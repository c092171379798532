import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
norms = []
for _ in range(3):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 1))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    norms.append(sum(p.grad.data.norm(2).item() ** 2 for p in model.parameters()) ** 0.5)  # measured-while-scaled
    scaler.step(optimizer)
    scaler.update()
