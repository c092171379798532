"""The weight of an aspect ratio is 0/0 for a box that fits exactly, in half precision.

Source: https://github.com/ultralytics/yolov5/issues/2376
Cause: aten.div
Remedy: epsilon
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class CIoU(nn.Module):
    def forward(self, predicted, wanted):
        (w1, h1), (w2, h2) = predicted.unbind(1), wanted.unbind(1)
        inter = torch.min(w1, w2) * torch.min(h1, h2)
        iou = inter / (w1 * h1 + w2 * h2 - inter + 1e-9)
        v = (4 / torch.pi**2) * (torch.atan(w2 / h2) - torch.atan(w1 / h1)).square()
        alpha = v / (1 + 1e-9 - iou + v + (0 if BROKEN else 1e-7))  # <- fault
        return (1 - iou + alpha * v).mean()


model, loss_fn = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2), nn.Softplus()), CIoU()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(16):
    x, wanted = torch.randn(8, 6), torch.rand(8, 2) + 0.5
    with torch.autocast("cpu", torch.bfloat16):
        boxes = model(x).float()
    if step == 6:
        wanted[4] = boxes[4].detach()
    loss = loss_fn(boxes, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
