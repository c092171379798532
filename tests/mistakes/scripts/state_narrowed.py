import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(2):
    nn.functional.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
model.bfloat16().load_state_dict(checkpoint["model"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
optimizer.load_state_dict(checkpoint["optimizer"])  # state-narrowed
