import io

import torch
from torch import nn

import castwise

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 1))
optimizer = castwise.MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-4), model, dtype=torch.float16)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for _ in range(4):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
saved = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, saved)
saved.seek(0)
checkpoint = torch.load(saved)
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
