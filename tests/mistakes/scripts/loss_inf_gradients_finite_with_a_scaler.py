import torch
from torch import nn

import castwise

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
monitor = castwise.Monitor(model, optimizer, scaler, on_nonfinite="diagnose").attach()
for step in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(torch.randn(4, 8)).float()
        penalty = torch.full((), torch.inf if step == 2 else 0.0)
        loss = output.square().mean() + penalty
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()  # loss-inf-gradients-finite
monitor.detach()
