import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).bfloat16()
copies = [param.detach().float().requires_grad_() for param in model.parameters()]
optimizer = torch.optim.SGD(copies, lr=0.1)
for _ in range(24):
    model(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean().backward()
    for copy, param in zip(copies, model.parameters(), strict=True):
        copy.grad, param.grad = param.grad.float(), None
    optimizer.step()
    with torch.no_grad():
        for copy, param in zip(copies, model.parameters(), strict=True):
            param.copy_(copy)
