"""A small transformer that is trained in emulated fp16; its arguments plant a fault, or are the remedy of one."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--logits", type=float, default=1.0)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--nan-batch", type=int, default=0)
parser.add_argument("--steps", type=int, default=24)
args = parser.parse_args()


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = (q * args.logits) @ (k * args.logits).transpose(-1, -2)
        return self.out((logits / args.logits**2 / math.sqrt(q.shape[-1])).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(width), Attention(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(functional.gelu(x))


class Transformer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
model = Transformer()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
batches = [torch.randn(4, 6, 8) for _ in range(4)]
for step in range(1, args.steps + 1):
    x = batches[step % 4].clone()
    if step == args.nan_batch:
        x[1, 2, 3] = math.nan
    with torch.autocast("cpu", dtype=torch.float16):
        loss = functional.mse_loss(model(x).float(), batches[step % 4].cumsum(1))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step in (1, args.steps):
        print(f"loss {loss.item():.6f}")
