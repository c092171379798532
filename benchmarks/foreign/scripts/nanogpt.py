"""A GPT trained as nanoGPT's train.py does: accumulated, clipped, with an estimate of the loss in between.

python nanogpt.py bfloat16|float16 [--compile] [--fp32-head]
"""

import sys
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

BLOCK, VOCABULARY, WIDTH, HEADS, LAYERS, BATCH, ACCUMULATION, STEPS = 32, 96, 64, 4, 1, 4, 2, 6

FP32_HEAD = "--fp32-head" in sys.argv


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (each.view(b, t, HEADS, -1).transpose(1, 2) for each in self.c_attn(self.ln_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h, self.ln_f = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, index, targets):
        x = self.wte(index) + self.wpe(torch.arange(index.size(1)))
        x = self.ln_f(self.h(x))
        if FP32_HEAD:
            with torch.autocast("cpu", enabled=False):
                logits = self.lm_head(x.float())
        else:
            logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


dtype = getattr(torch, sys.argv[1])
torch.manual_seed(1337)
data = torch.randint(VOCABULARY, (4096,))


def get_batch():
    starts = torch.randint(len(data) - BLOCK, (BATCH,)).tolist()
    return tuple(torch.stack([data[i + shift : i + shift + BLOCK] for i in starts]) for shift in (0, 1))


model = GPT()
ctx = nullcontext() if dtype == torch.float32 else torch.amp.autocast(device_type="cpu", dtype=dtype)
scaler = torch.amp.GradScaler("cpu", enabled=(dtype == torch.float16))
matrices = [p for p in model.parameters() if p.dim() >= 2]
vectors = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
if "--compile" in sys.argv:
    model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(2)
    for k in range(2):
        x, y = get_batch()
        with ctx:
            logits, loss = model(x, y)
        losses[k] = loss.item()
    model.train()
    return losses.mean(), logits.dtype


x, y = get_batch()
for iteration in range(STEPS):
    if iteration % 3 == 0:
        print(f"step {iteration}: loss {estimate_loss()}")
    for _ in range(ACCUMULATION):
        with ctx:
            logits, loss = model(x, y)
            loss = loss / ACCUMULATION
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {iteration}: loss {loss.item() * ACCUMULATION}, norm {norm.item()}, scale {scaler.get_scale()}")
