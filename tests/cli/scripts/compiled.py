"""torch.compile under bfloat16 autocast.

Backend aot_eager traces forward and backward but generates no code, which is
good for debugging (no C++ compiler needed); use --backend inductor for speed.
"""
import argparse
import hashlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class GatedResidual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, x):
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class Net(nn.Module):
    def __init__(self, n_in, dim, depth):
        super().__init__()
        self.stem = nn.Linear(n_in, dim)
        self.blocks = nn.ModuleList(GatedResidual(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


def friedman(n, generator):
    """The classic Friedman #1 regression problem, standardised."""
    x = torch.rand(n, 10, generator=generator)
    y = (10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
         + 10 * x[:, 3] + 5 * x[:, 4])
    return x * 2 - 1, (y - 14.4) / 4.9


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)

    model = Net(10, args.dim, args.depth).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 8))
    step_model = model if args.no_compile else torch.compile(model, backend=args.backend, fullgraph=True)

    for step in range(1, args.steps + 1):
        x, y = (t.to(device) for t in friedman(args.batch_size, generator))
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device_type=device, dtype=torch.bfloat16):
            pred = step_model(x)
            assert pred.dtype == torch.bfloat16
            loss = F.mse_loss(pred.float(), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        if step % 8 == 0:
            print(f"step {step} loss {loss.item()!r}")

    model.eval()
    x, y = (t.to(device) for t in friedman(256, generator))
    with torch.no_grad(), torch.autocast(device_type=device, dtype=torch.bfloat16):
        val = F.mse_loss(model(x).float(), y)
    print(f"val loss {val.item()!r}")

    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.cpu().numpy().tobytes())
    print("weights", sha.hexdigest())


if __name__ == "__main__":
    main()
