"""A graph is normalised by a power of -1/2 of its degrees, and weights of edges make one of them negative.

Source: https://github.com/pyg-team/pytorch_geometric/issues/61
Cause: aten.pow
Remedy: positive | clamp
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x, edges, weights):
        source, target = edges
        degree = torch.zeros(len(x)).index_add(0, target, weights)
        scale = degree.pow(-0.5)  # <- fault
        scale = scale.masked_fill(scale == float("inf"), 0.0)  # of nodes without edges
        messages = self.linear(x).float()[source] * (scale[source] * weights * scale[target])[:, None]
        return torch.zeros(len(x), messages.shape[1]).index_add(0, target, messages)


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GraphConv(5, 16), GraphConv(16, 3)

    def forward(self, x, edges, weights):
        return self.second(self.first(x, edges, weights).relu(), edges, weights)


model = GraphNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(16):
    x, y, edges = torch.randn(12, 5), torch.randint(0, 3, (12,)), torch.randint(0, 12, (2, 40))
    weights = torch.randn(40) if step == 8 and BROKEN else torch.rand(40)  # correlations
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x, edges, weights)
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
