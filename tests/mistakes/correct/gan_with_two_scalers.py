import torch
from torch import nn

torch.manual_seed(0)
generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (generator, critic)]
scalers = [torch.amp.GradScaler("cpu", init_scale=64.0), torch.amp.GradScaler("cpu", init_scale=4.0)]
for _ in range(4):
    with torch.autocast("cpu", dtype=torch.float16):
        images = generator(torch.randn(4, 4))
        loss = (critic(images.detach()) - critic(torch.randn(4, 8))).float().mean()
    optimizers[1].zero_grad()
    scalers[1].scale(loss).backward()
    scalers[1].step(optimizers[1])
    scalers[1].update()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = -critic(images).float().mean()
    optimizers[0].zero_grad()
    scalers[0].scale(loss).backward()  # reaches the critic too
    scalers[0].step(optimizers[0])
    scalers[0].update()
