"""A GPT on random tokens: rotary positions, gated feed-forward layers, tied embeddings, accumulated micro-batches."""

import math

import torch
from torch import nn
from torch.nn import functional as F

DTYPE = torch.float32
VOCAB, WIDTH, HEADS, LENGTH, BATCH = 61, 32, 4, 24, 8


class RMSNorm(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotated(x, base=10_000.0):
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2]).unsqueeze(1) * base ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = rotated(q), rotated(k)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        mixed = (weights.to(v.dtype) @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        return F.dropout(self.out(mixed), 0.1, self.training)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = RMSNorm(), Attention()
        self.norm2, self.feed_forward = RMSNorm(), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) * math.sqrt(WIDTH)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)


def train(probe):
    torch.manual_seed(0)
    model = GPT()
    nn.init.normal_(model.embedding.weight, std=0.2)
    for block in model.blocks:
        nn.init.normal_(block.feed_forward.down.weight, std=0.1 / math.sqrt(2))
    data = torch.randint(0, VOCAB, (3, 2, BATCH, LENGTH + 1))
    data[..., -2:] = -1
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=DTYPE is torch.float16)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        for tokens in batch:
            inputs, targets = tokens[:, :-1].clamp(min=0), tokens[:, 1:]
            with torch.autocast("cpu", dtype=DTYPE, enabled=DTYPE is not torch.float32):
                logits = model(inputs)
            loss = loss_of(logits, targets) / len(batch)
            scaler.scale(loss).backward()
            losses.append(loss.item())
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        warmup.step()
    return model, losses
