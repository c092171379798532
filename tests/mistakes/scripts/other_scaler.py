import torch
from torch import nn

torch.manual_seed(0)
models = [nn.Linear(8, 1), nn.Linear(8, 1)]
optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu", init_scale=4.0)]
for _ in range(3):
    for model, scaler in zip(models, scalers, strict=True):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(torch.randn(4, 8)).float(), torch.zeros(4, 1))
        scaler.scale(loss).backward()
    for optimizer, scaler in zip(optimizers, reversed(scalers), strict=True):
        scaler.step(optimizer)  # other-scaler
        scaler.update()
        optimizer.zero_grad()
