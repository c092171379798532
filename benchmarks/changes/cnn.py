"""A residual CNN on random images: batch norm, Nesterov momentum, label smoothing, averaged weights."""

import torch
from torch import nn
from torch.nn import functional as F

DTYPE = torch.float32
CLASSES, WIDTH, SIZE, BATCH = 7, 8, 12, 12


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return F.relu(out + x)


class SqueezeExcite(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.down = nn.Conv2d(channels, channels // 4, 1)
        self.up = nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x):
        scale = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.up(F.relu(self.down(scale))))


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.body = nn.Sequential(Residual(WIDTH), SqueezeExcite(WIDTH), Residual(WIDTH))
        self.shrink = nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, images):
        x = self.body(self.stem(images))
        x = F.gelu(self.norm(self.shrink(x)))
        x = F.avg_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


def normalized(images):
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.3, 0.25, 0.2])
    return (images - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)


def train(probe):
    torch.manual_seed(0)
    model = CNN()
    nn.init.kaiming_normal_(model.stem.weight, nonlinearity="relu")
    nn.init.zeros_(model.head.bias)
    images, labels = torch.rand(3, BATCH, 3, SIZE, SIZE), torch.randint(0, CLASSES, (3, BATCH))
    averaged = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=DTYPE is torch.float16)
    losses = []
    for batch, targets in zip(images, labels):
        batch = torch.where(torch.rand(BATCH, 1, 1, 1) < 0.5, batch.flip(-1), batch)
        with torch.autocast("cpu", dtype=DTYPE, enabled=DTYPE is not torch.float32):
            logits = model(normalized(batch))
            loss = F.cross_entropy(logits, targets, label_smoothing=0.1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        cosine.step()
        with torch.no_grad():
            for average, param in zip(averaged, model.parameters()):
                average.lerp_(param, 0.1)
        probe("averaged", averaged[0])
        losses.append(loss.item())
    return model, losses
