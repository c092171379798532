"""Fit a small network to a 2-d surface with L-BFGS, forward pass in bfloat16.

L-BFGS evaluates a closure several times per step, which GradScaler does not
support; bfloat16 has the range of float32, so no scaler is needed.
"""
import argparse
import hashlib
import warnings
from contextlib import nullcontext

import torch
import torch.cpu.amp
from torch import nn

warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.c.*.amp.autocast.*")


def surface(xy):
    x, y = xy.unbind(1)
    return (torch.sin(2 * x) * torch.cos(y) + 0.25 * x * y).unsqueeze(1)


class FourierNet(nn.Module):
    def __init__(self, hidden=24, features=8):
        super().__init__()
        self.register_buffer("freqs", torch.randn(2, features))
        self.layers = nn.Sequential(
            nn.Linear(2 * features + 2, hidden), nn.Tanh(),
            nn.Linear(hidden, hidden), nn.Tanh(),
            nn.Linear(hidden, 1),
        )

    def forward(self, xy):
        phase = xy @ self.freqs
        return self.layers(torch.cat([xy, phase.sin(), phase.cos()], dim=1))


def amp_context(device, precision):
    if precision == "fp32":
        return nullcontext()
    if device == "cpu":
        return torch.cpu.amp.autocast(dtype=torch.bfloat16)
    return torch.cuda.amp.autocast(dtype=torch.bfloat16)


def train(model, points, target, args, device):
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=args.lr, max_iter=args.max_iter, history_size=args.history,
        line_search_fn="strong_wolfe" if args.line_search else None)
    criterion = nn.MSELoss()
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        with amp_context(device, args.precision):
            prediction = model(points)
            loss = criterion(prediction, target)
        penalty = sum(p.square().sum() for p in model.parameters())  # float32
        loss = loss + args.weight_decay * penalty
        loss.backward()
        return loss

    for step in range(args.steps):
        loss = optimizer.step(closure)
        if step % 4 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item()!r} closure calls {calls}")


@torch.no_grad()
def evaluate(model, n, device, precision):
    grid = torch.linspace(-2, 2, n, device=device)
    points = torch.cartesian_prod(grid, grid)
    with amp_context(device, precision):
        out = model(points)
    return (out.float() - surface(points)).square().mean().sqrt().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--max-iter", type=int, default=6)
    parser.add_argument("--history", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--weight-decay", type=float, default=1e-5)
    parser.add_argument("--line-search", action="store_true")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    model = FourierNet().to(device)
    points = (torch.rand(256, 2) * 4 - 2).to(device)

    train(model, points, surface(points), args, device)
    print(f"rmse {evaluate(model, 16, device, args.precision)!r}")

    sha = hashlib.sha256()
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32, name
        sha.update(value.cpu().numpy().tobytes())
    print("weights", sha.hexdigest())
