"""A torch.nn.TransformerEncoder, evaluated between its steps under torch.amp."""
import hashlib

import torch
import torch.nn as nn
from torch.amp import GradScaler, autocast

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = GradScaler("cpu")
x, y = torch.randn(8, 5, 16), torch.randn(8, 5, 1)


def evaluate():
    model.eval()
    with torch.inference_mode(), autocast("cpu", dtype=torch.bfloat16):
        features = model[0](x)
        output = model(x)
    model.train()
    digest = hashlib.sha256(features.float().numpy().tobytes()).hexdigest()[:12]
    print(f"eval {features.dtype} {digest} {output.float().mean().item():.9g}")


for step in range(12):
    evaluate()
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    evaluate()
    scaler.step(optimizer)
    scaler.update()
evaluate()
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])
