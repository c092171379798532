"""Training that can be interrupted and resumed without changing the result.

The checkpoint holds the model, optimizer, scheduler, scaler and generator
states; --stop-after N ends the process after step N as a preemption would.
"""
import argparse
import hashlib
import pathlib
import sys

import torch
import torch.nn as nn
from torch.amp import GradScaler, autocast


class Regressor(nn.Module):
    def __init__(self, n_in=12, width=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_in, width), nn.BatchNorm1d(width), nn.SiLU(), nn.Dropout(0.1),
            nn.Linear(width, width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def make_data(seed, n=384):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    y = x[:, 0] * x[:, 1] + torch.sin(2 * x[:, 2]) + 0.5 * x[:, 3:6].sum(1)
    return x, (y - y.mean()) / y.std()


def get_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--save-every", type=int, default=10)
    p.add_argument("--stop-after", type=int, default=None, metavar="N")
    p.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/resume"))
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--amp-dtype", choices=("fp16", "bf16"), default="fp16")
    p.add_argument("--seed", type=int, default=42)
    return p.parse_args()


def save_checkpoint(path, step, **objects):
    state = {name: obj.state_dict() for name, obj in objects.items()}
    state["step"] = step
    state["rng"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state["cuda_rng"] = torch.cuda.get_rng_state_all()
    tmp = path.with_suffix(".tmp")
    torch.save(state, tmp)
    tmp.replace(path)


def load_checkpoint(path, **objects):
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, obj in objects.items():
        obj.load_state_dict(state[name])
    torch.set_rng_state(state["rng"])
    if torch.cuda.is_available() and "cuda_rng" in state:
        torch.cuda.set_rng_state_all(state["cuda_rng"])
    return state["step"]


def digest(model):
    sha = hashlib.sha256()
    for value in model.state_dict().values():
        sha.update(value.cpu().numpy().tobytes())
    return sha.hexdigest()


def main():
    args = get_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if args.amp_dtype == "fp16" else torch.bfloat16
    torch.manual_seed(args.seed)

    x, y = (t.to(device) for t in make_data(args.seed))
    model = Regressor().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=15, gamma=0.5)
    scheduler = torch.optim.lr_scheduler.ChainedScheduler([warmup, decay], optimizer=optimizer)
    scaler = GradScaler(device.type, init_scale=2.0 ** 20, growth_interval=7,
                        enabled=dtype is torch.float16)
    stateful = dict(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)

    checkpoint = args.out / "last.pt"
    start = 0
    if args.resume:
        if not checkpoint.exists():
            sys.exit(f"nothing to resume in {args.out}")
        start = load_checkpoint(checkpoint, **stateful)
        print(f"resumed at step {start} scale {scaler.get_scale()!r}", file=sys.stderr)
    args.out.mkdir(parents=True, exist_ok=True)

    model.train()
    for step in range(start + 1, args.steps + 1):
        idx = torch.randint(len(x), (args.batch_size,)).to(device)
        optimizer.zero_grad()
        with autocast(device_type=device.type, dtype=dtype):
            loss = nn.functional.smooth_l1_loss(model(x[idx]), y[idx])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            scheduler.step()

        if step % 5 == 0:
            print(f"step {step} loss {loss.item()!r} scale {scaler.get_scale()!r} "
                  f"lr {optimizer.param_groups[0]['lr']!r}")
        if step % args.save_every == 0:
            save_checkpoint(checkpoint, step, **stateful)
        if args.stop_after is not None and step >= args.stop_after:
            print(f"stopped after step {step}")
            break

    print("weights", digest(model))


if __name__ == "__main__":
    main()
