"""Character language model with gradient accumulation under torch.amp.

The corpus is the source of the Python standard library, so nothing has to be
downloaded.  The effective batch is --batch-size * --accum sequences.
"""
import argparse
import hashlib
import math
import os
import pathlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def load_corpus(max_chars):
    root = pathlib.Path(os.__file__).parent
    parts, total = [], 0
    for path in sorted(root.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        parts.append(text)
        total += len(text)
        if total >= max_chars:
            break
    text = "".join(c for c in "".join(parts)[:max_chars] if ord(c) < 128)
    vocab = sorted(set(text))
    index = {c: i for i, c in enumerate(vocab)}
    return torch.tensor([index[c] for c in text]), len(vocab)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class CharLM(nn.Module):
    def __init__(self, vocab, context, dim=32, heads=4, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.tok.weight  # tied
        nn.init.normal_(self.tok.weight, std=0.05)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        return self.head(self.norm(self.blocks(x)))


def get_batch(data, batch_size, context, generator, device):
    start = torch.randint(len(data) - context - 1, (batch_size,), generator=generator)
    x = torch.stack([data[i:i + context] for i in start])
    y = torch.stack([data[i + 1:i + context + 1] for i in start])
    return x.to(device), y.to(device)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50, help="micro steps (forward/backward passes)")
    parser.add_argument("--accum", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--context", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--init-scale", type=float, default=2.0 ** 18)
    parser.add_argument("--growth-interval", type=int, default=3)
    parser.add_argument("--amp-dtype", choices=sorted(DTYPES), default="fp16")
    parser.add_argument("--fused", action="store_true", help="fused AdamW")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = DTYPES[args.amp_dtype]
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)

    data, vocab = load_corpus(40_000)
    model = CharLM(vocab, args.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, fused=args.fused)
    updates = math.ceil(args.steps / args.accum)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)
    scaler = GradScaler(device, init_scale=args.init_scale, growth_interval=args.growth_interval,
                        enabled=dtype == torch.float16)

    optimizer.zero_grad(set_to_none=True)
    running = 0.0
    for step in range(args.steps):
        x, y = get_batch(data, args.batch_size, args.context, generator, device)
        # the last window may be shorter than --accum
        window = min(args.accum, args.steps - step // args.accum * args.accum)
        with autocast(device_type=device, dtype=dtype):
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) / window
        scaler.scale(loss).backward()
        running += loss.item()

        if (step + 1) % args.accum == 0 or step + 1 == args.steps:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            old_scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= old_scale:  # the step was not skipped
                scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            print(f"step {step + 1} loss {running!r} norm {norm.item()!r} "
                  f"scale {scaler.get_scale()!r} lr {scheduler.get_last_lr()[0]!r}")
            running = 0.0

    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().numpy().tobytes())
    print("weights", digest.hexdigest())


if __name__ == "__main__":
    main()
