# broken: not-in-optimizer
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8), nn.Flatten(), nn.Linear(32, 24))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model[0] = nn.Embedding(24, 8)  # 8 new tokens
for _ in range(24):
    tokens = torch.randint(24, (4, 4))
    nn.functional.cross_entropy(model(tokens), tokens[:, 0]).backward()
    optimizer.step()
    optimizer.zero_grad()
