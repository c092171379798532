"""A model in TorchScript whose forward has a region, between eager regions."""

import hashlib

import torch

torch.manual_seed(4)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            x = torch.relu(self.hidden(x))
            with torch.autocast("cpu", enabled=False):
                x = x.float() * 2
            return self.head(x)


def error(y, target):
    with torch.cpu.amp.autocast(dtype=torch.float16):
        return ((y @ torch.eye(4)).float() - target).pow(2).mean()


try:
    error = torch.jit.script(error)
except TypeError as reason:  # from torch, on Python 3.13
    print("not scripted:", reason)
model = torch.jit.script(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=8)
x = torch.randn(16, 8)
for step in range(12):
    optimizer.zero_grad()
    y = model(x)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = error(y, x[:, :4])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, y.dtype, loss.item())
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
