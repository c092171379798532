import copy

import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))
teacher = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(24):
    with torch.no_grad():
        labels = [model(torch.randn(4, 8)).argmax(-1) for _ in range(4)] + [teacher(torch.randn(4, 8)).argmax(-1)]
    for label in labels:
        nn.functional.cross_entropy(model(torch.randn(4, 8)), label).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 0.01)
