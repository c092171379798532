"""Custom autograd functions that behave well under autocast.

* LinearSwish runs in whatever precision autocast selects (custom_fwd alone).
* GeometricPool needs float32 (custom_fwd with cast_inputs).
* ClampedLog also needs float32; it saves an input and returns several outputs.
"""
import argparse
import hashlib

import torch
from torch import nn
from torch.amp import GradScaler, custom_bwd, custom_fwd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class LinearSwish(torch.autograd.Function):
    """y = swish(x @ w.T + b), recomputing the sigmoid in backward."""

    @staticmethod
    @custom_fwd(device_type=DEVICE)
    def forward(ctx, x, weight, bias):
        pre = torch.nn.functional.linear(x, weight, bias)
        ctx.save_for_backward(x, weight, pre)
        return pre * torch.sigmoid(pre)

    @staticmethod
    @custom_bwd(device_type=DEVICE)
    def backward(ctx, grad_out):
        x, weight, pre = ctx.saved_tensors
        sig = torch.sigmoid(pre)
        grad_pre = grad_out * (sig + pre * sig * (1 - sig))
        grad_x = grad_w = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_pre.mm(weight).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_w = grad_pre.t().mm(x).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_b = grad_pre.float().sum(0)
        return grad_x, grad_w, grad_b


class GeometricPool(torch.autograd.Function):
    """Generalised mean over the last dimension; x**p overflows in float16."""

    @staticmethod
    @custom_fwd(device_type=DEVICE, cast_inputs=torch.float32)
    def forward(ctx, x, p):
        assert not torch.is_autocast_enabled(DEVICE)
        x = x.clamp(min=1e-6)
        mean = x.pow(p).mean(-1, keepdim=True)
        out = mean.pow(1.0 / p)
        ctx.p = p
        ctx.save_for_backward(x, mean, out)
        return out.squeeze(-1)

    @staticmethod
    @custom_bwd(device_type=DEVICE)
    def backward(ctx, grad_out):
        x, mean, out = ctx.saved_tensors
        grad = grad_out.unsqueeze(-1) * out / mean * x.pow(ctx.p - 1) / x.size(-1)
        return grad.masked_fill(x <= 1e-6, 0.0), None


class ClampedLog(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type=DEVICE, cast_inputs=torch.float32)
    def forward(ctx, x, eps):
        mask = x > eps
        ctx.save_for_backward(x, mask)
        ctx.mark_non_differentiable(mask)
        return torch.where(mask, x, torch.full_like(x, eps)).log(), mask

    @staticmethod
    @custom_bwd(device_type=DEVICE)
    def backward(ctx, grad_log, _):
        x, mask = ctx.saved_tensors
        return torch.where(mask, grad_log / x, torch.zeros_like(x)), None


class Net(nn.Module):
    def __init__(self, d_in, d_hidden, groups, classes):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.randn(d_hidden, d_in) / d_in ** 0.5)
        self.bias = nn.Parameter(torch.zeros(d_hidden))
        self.mid = nn.Linear(d_hidden, d_hidden)
        self.head = nn.Linear(groups, classes)

    def forward(self, x):
        h = LinearSwish.apply(x, self.weight, self.bias)
        h = torch.relu(self.mid(h)) + 0.1
        pooled = GeometricPool.apply(h.unflatten(1, (self.groups, -1)), 6.0)
        logs, _ = ClampedLog.apply(pooled, 1e-3)
        return self.head(logs)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--amp-dtype", default="fp16", choices=["fp16", "bf16", "off"])
    ap.add_argument("--seed", type=int, default=5)
    args = ap.parse_args()

    torch.manual_seed(args.seed)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "off": torch.bfloat16}[args.amp_dtype]
    net = Net(20, 32, 8, 3).to(DEVICE)
    teacher = torch.randn(20, 3)
    opt = torch.optim.RMSprop(net.parameters(), lr=args.lr)
    scaler = GradScaler(DEVICE, init_scale=2.0 ** 15, growth_interval=10, enabled=args.amp_dtype == "fp16")

    for step in range(1, args.steps + 1):
        x = torch.randn(args.batch_size, 20)
        y = (x @ teacher).argmax(1).to(DEVICE)
        x = x.to(DEVICE)
        opt.zero_grad()
        with torch.autocast(DEVICE, dtype=dtype, enabled=args.amp_dtype != "off"):
            loss = nn.functional.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 6 == 0:
            print(f"step {step} loss {loss.item()!r} scale {scaler.get_scale()!r}")

    sha = hashlib.sha256()
    for tensor in net.state_dict().values():
        sha.update(tensor.cpu().numpy().tobytes())
    print("weights", sha.hexdigest())


if __name__ == "__main__":
    main()
