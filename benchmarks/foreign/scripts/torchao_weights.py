"""Weights of torchao, tensor subclasses in int8 and float8, in regions of autocast: evaluated, and trained.

python torchao_weights.py
"""

import torch
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

region = torch.autocast("cpu", dtype=torch.bfloat16)
x = torch.linspace(-1, 1, 4 * 64).view(4, 64)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 8))


for config in (Int8WeightOnlyConfig, Float8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig):
    model = build().eval()
    quantize_(model, config())
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        try:
            with context, region:
                y = model(x)
            print(config.__name__, type(model[0].weight).__name__, y.dtype, y.double().sum().item())
        except Exception as error:  # what it says is part of what is compared
            print(config.__name__, type(error).__name__, error)

model = build()  # a frozen quantized layer below one that is trained
quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "0")
for kind in (AdamW8bit, AdamW4bit, AdamWFp8):
    optimizer, scaler = kind(model[2:].parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    for _ in range(3):
        with region:
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(kind.__name__, loss.item(), scaler.get_scale(), model[3].weight.double().sum().item())
