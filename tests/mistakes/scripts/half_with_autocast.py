import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    with torch.autocast("cpu", dtype=torch.bfloat16):  # half-with-autocast
        loss = nn.functional.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
