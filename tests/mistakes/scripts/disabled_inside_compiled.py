import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        x = self.body(x).relu()
        with torch.autocast("cpu", enabled=False):  # disabled-inside-compiled
            return self.head(x.float())


torch.manual_seed(0)
model = Model()
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(compiled(torch.randn(4, 8)), torch.zeros(4, 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
