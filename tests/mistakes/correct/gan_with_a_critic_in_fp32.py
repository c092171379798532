import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
critic = nn.Linear(1, 1)
optimizer_of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for _ in range(4):
    with torch.autocast("cpu", dtype=torch.float16):
        fake = model(torch.randn(4, 8))
        loss = nn.functional.softplus(-critic(fake)).mean()
    scaler.scale(loss).backward()  # brings gradients to the critic too, which are dropped
    scaler.step(optimizer)
    optimizer.zero_grad()
    optimizer_of_critic.zero_grad()
    nn.functional.softplus(critic(fake.detach().float())).mean().backward()
    optimizer_of_critic.step()
    scaler.update()
