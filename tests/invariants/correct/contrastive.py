import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
temperature = nn.Parameter(torch.tensor(1.0))
optimizer = torch.optim.AdamW([*model.parameters(), temperature], lr=1e-3)
for _ in range(24):
    a, b = (nn.functional.normalize(model(torch.randn(4, 8)), dim=-1) for _ in range(2))
    nn.functional.cross_entropy(temperature.exp() * a @ b.T, torch.arange(4)).backward()
    optimizer.step()
    optimizer.zero_grad()
