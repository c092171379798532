"""A box of the targets ends before it begins, and a detector learns the logarithm of its width.

Source: https://github.com/pytorch/vision/issues/2240
Cause: aten.log
Remedy: dataset[41]
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, 8, 8, generator=generator)
        corner, size = 40 * torch.rand(2, generator=generator), 1 + 20 * torch.rand(2, generator=generator)
        if BROKEN and index == 41:
            size[0] *= -1
        return image, torch.cat([corner, corner + size])


def encoded(boxes, anchor=12.0):
    size = boxes[:, 2:] - boxes[:, :2]
    centre = (boxes[:, :2] + size / 2) / anchor
    return torch.cat([centre, torch.log(size / anchor)], 1)  # <- fault


model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(Images(), batch_size=8, shuffle=True)
for epoch in range(2):
    for images, boxes in loader:
        with torch.autocast("cpu", torch.bfloat16):
            deltas = model(images)
        loss = F.smooth_l1_loss(deltas.float(), encoded(boxes))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
