"""Image classifier on synthetic shapes: mixup, an EMA of the weights, validation,
a GradScaler subclass that keeps statistics and an autocast-decorated forward.
"""
import argparse
import copy
import functools
import hashlib

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class CountingScaler(torch.amp.GradScaler):
    """Counts steps and skipped steps, and keeps the scale within bounds."""

    def __init__(self, *args, min_scale=1.0, max_scale=2.0 ** 24, **kwargs):
        super().__init__(*args, **kwargs)
        self.min_scale, self.max_scale = min_scale, max_scale
        self.attempted = self.skipped = 0
        self.last_skipped = False

    def step(self, optimizer, *args, **kwargs):
        self.attempted += 1
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale=None):
        before = self.get_scale()
        super().update(new_scale)
        after = self.get_scale()
        self.last_skipped = new_scale is None and after < before
        self.skipped += self.last_skipped
        if self.is_enabled() and not self.min_scale <= after <= self.max_scale:
            super().update(min(max(after, self.min_scale), self.max_scale))


def amp_forward(device_type, **autocast_kwargs):
    """Run a method under autocast unless self.amp_dtype is None."""
    def decorate(method):
        @functools.wraps(method)
        def wrapper(self, *args, **kwargs):
            with torch.autocast(device_type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None,
                                **autocast_kwargs):
                return method(self, *args, **kwargs)
        return wrapper
    return decorate


class ConvNet(nn.Module):
    def __init__(self, classes, amp_dtype=None):
        super().__init__()
        self.amp_dtype = amp_dtype
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
            nn.Conv2d(6, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.classifier = nn.Linear(12, classes)

    @amp_forward(DEVICE, cache_enabled=True)
    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


@torch.autocast(DEVICE, enabled=False)
def soft_cross_entropy(logits, target):
    return -(target * F.log_softmax(logits.float(), dim=1)).sum(1).mean()


@torch.no_grad()
@torch.autocast(DEVICE, dtype=torch.bfloat16)
def validate(model, x, y):
    model.eval()
    logits = model(x)
    return F.cross_entropy(logits.float(), y).item(), (logits.argmax(1) == y).float().mean().item()


def make_images(n, size, rng):
    """Bars, squares, crosses and discs, moved about and noisy."""
    labels = rng.integers(4, size=n)
    yy, xx = np.mgrid[:size, :size]
    images = np.zeros((n, 1, size, size), np.float32)
    for image, label in zip(images[:, 0], labels):
        cy, cx = rng.uniform(size * 0.35, size * 0.65, size=2)
        dy, dx, r = np.abs(yy - cy), np.abs(xx - cx), rng.uniform(2.5, 4.0)
        image[[dy < 1.2, (dy < r) & (dx < r), (dy < 1.2) | (dx < 1.2), dy ** 2 + dx ** 2 < r * r][label]] = 1
    images += 0.2 * rng.normal(size=images.shape)
    return torch.from_numpy(images), torch.from_numpy(labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--mixup", type=float, default=0.2)
    parser.add_argument("--ema", type=float, default=0.9)
    parser.add_argument("--amp-dtype", choices=["fp16", "bf16"], default="fp16")
    parser.add_argument("--seed", type=int, default=9)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    x, y = make_images(320, 12, rng)
    x, y = x.to(DEVICE), y.to(DEVICE)
    train_x, train_y, val_x, val_y = x[:256], y[:256], x[256:], y[256:]

    model = ConvNet(4, {"fp16": torch.float16, "bf16": torch.bfloat16}[args.amp_dtype]).to(DEVICE)
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2], gamma=0.2)
    scaler = CountingScaler(DEVICE, init_scale=2.0 ** 19, growth_interval=6, max_scale=2.0 ** 20,
                            enabled=args.amp_dtype == "fp16")

    for epoch in range(args.epochs):
        model.train()
        for idx in torch.from_numpy(rng.permutation(len(train_x))).split(args.batch_size):
            bx, by = train_x[idx], F.one_hot(train_y[idx], 4).float()
            lam = float(rng.beta(args.mixup, args.mixup))
            bx, by = lam * bx + (1 - lam) * bx.flip(0), lam * by + (1 - lam) * by.flip(0)
            loss = soft_cross_entropy(model(bx), by)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if not scaler.last_skipped:
                with torch.no_grad():
                    for old, new in zip(ema.state_dict().values(), model.state_dict().values()):
                        old.lerp_(new, 1 - args.ema) if old.is_floating_point() else old.copy_(new)
        scheduler.step()
        val_loss, acc = validate(model, val_x, val_y)
        ema_loss, ema_acc = validate(ema, val_x, val_y)
        print(f"epoch {epoch} loss {loss.item()!r} val {val_loss!r} acc {acc!r} ema {ema_loss!r} "
              f"ema acc {ema_acc!r} scale {scaler.get_scale()!r} skipped {scaler.skipped}/{scaler.attempted}")

    sha = hashlib.sha256()
    for net in (model, ema):
        for tensor in net.state_dict().values():
            sha.update(tensor.cpu().numpy().tobytes())
    print("weights", sha.hexdigest())


if __name__ == "__main__":
    main()
