"""DistributedDataParallel with GradScaler, launched by torchrun:

    torchrun --nproc-per-node 2 ddp.py
"""
import argparse
import hashlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP


def setup():
    use_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if use_cuda else "gloo")
    if use_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


class SequenceDataset:
    """Is the sum of a noisy sinusoid's second half larger than the first's?"""

    def __init__(self, n, length, seed):
        g = torch.Generator().manual_seed(seed)
        phase = torch.rand(n, 1, generator=g) * 6.2832
        freq = 0.5 + torch.rand(n, 1, generator=g)
        t = torch.linspace(0, 6.2832, length)
        self.x = torch.sin(freq * t + phase) + 0.1 * torch.randn(n, length, generator=g)
        half = length // 2
        self.y = (self.x[:, half:].sum(1) > self.x[:, :half].sum(1)).float()

    def shard(self, epoch, batch_size, rank, world_size, seed):
        g = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(len(self.x), generator=g)
        usable = len(order) // (batch_size * world_size) * batch_size * world_size
        for idx in order[:usable][rank::world_size].split(batch_size):
            yield self.x[idx], self.y[idx]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--amp-dtype", choices=["fp16", "bf16"], default="fp16")
    parser.add_argument("--seed", type=int, default=13)
    args = parser.parse_args()

    device = setup()
    rank, world = dist.get_rank(), dist.get_world_size()
    # Metrics and objects go through a group of their own.  DDP keeps the default group and its
    # threads alive past destroy_process_group(), and with gloo a thread that lets go of a tensor
    # while the interpreter shuts down aborts the process.
    host_group = dist.new_group(backend="gloo")
    dtype = torch.float16 if args.amp_dtype == "fp16" else torch.bfloat16

    torch.manual_seed(args.seed)
    model = nn.Sequential(
        nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 6, 5, stride=2), nn.ReLU(),
        nn.Conv1d(6, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(24), nn.ReLU(),
        nn.Linear(24, 1), nn.Flatten(0)).to(device)
    model(torch.zeros(2, 32, device=device))  # materialise the lazy layer
    ddp = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)

    optimizer = torch.optim.Adam(ddp.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    scaler = GradScaler(device.type, init_scale=2.0 ** 19, growth_interval=10, enabled=args.amp_dtype == "fp16")
    criterion = nn.BCEWithLogitsLoss()
    data = SequenceDataset(384, 32, args.seed)

    step = 0
    for epoch in range(args.epochs):
        ddp.train()
        for x, y in data.shard(epoch, args.batch_size, rank, world, args.seed):
            optimizer.zero_grad(set_to_none=True)
            with autocast(device_type=device.type, dtype=dtype):
                loss = criterion(ddp(x.to(device)), y.to(device))
            scaler.scale(loss).backward()  # the all-reduce runs on scaled gradients
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(ddp.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
            step += 1
            if step % 8 == 0:
                mean = torch.tensor(loss.item())
                dist.all_reduce(mean, group=host_group)
                if rank == 0:
                    print(f"epoch {epoch} step {step} loss {(mean / world).item()!r} "
                          f"scale {scaler.get_scale()!r}", flush=True)
        scheduler.step()

    digest = hashlib.sha256()
    for tensor in ddp.module.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    digests = [None] * world
    dist.all_gather_object(digests, digest.hexdigest(), group=host_group)
    assert len(set(digests)) == 1, "the replicas have drifted apart"
    if rank == 0:
        print("weights", digests[0], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
