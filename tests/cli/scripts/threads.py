"""Data parallel training with one replica per Python thread.

The autocast state is thread local: a worker does not inherit the region its
caller is in, so every worker enters autocast by itself.  The gradients of the
replicas are summed into the master copy, which is stepped through one scaler.
"""
import argparse
import copy
import hashlib
import queue
import threading

import torch
from torch import autocast, nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class MLP(nn.Module):
    def __init__(self, n_in=16, width=40, n_out=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_in, width), nn.GELU(), nn.LayerNorm(width),
                                  nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, n_out)

    def forward(self, x):
        return self.head(self.body(x))


class Worker(threading.Thread):
    """Runs the forward pass of one replica on the shards it is handed."""

    def __init__(self, rank, master, dtype):
        super().__init__(name=f"replica-{rank}", daemon=True)
        self.replica = copy.deepcopy(master)
        self.dtype = dtype
        self.inbox, self.outbox = queue.Queue(), queue.Queue()

    def run(self):
        while True:
            job = self.inbox.get()
            if job is None:
                return
            try:
                self.outbox.put(self.forward(*job))
            except BaseException as exc:  # handed to the main thread
                self.outbox.put(exc)

    def forward(self, x, y, total):
        assert not torch.is_autocast_enabled(device)
        with autocast(device_type=device, dtype=self.dtype):
            logits = self.replica(x)
            assert logits.dtype == self.dtype
            loss = F.cross_entropy(logits, y, reduction="sum") / total
        assert not torch.is_autocast_enabled(device)
        return loss

    @torch.no_grad()
    def load_from(self, master):
        for mine, theirs in zip(self.replica.parameters(), master.parameters()):
            mine.copy_(theirs)
            mine.grad = None

    def result(self):
        out = self.outbox.get()
        if isinstance(out, BaseException):
            raise out
        return out


def reduce_gradients(master, workers):
    for params in zip(master.parameters(), *(w.replica.parameters() for w in workers)):
        target, *sources = params
        target.grad = torch.stack([p.grad for p in sources]).sum(0)


def train_step(master, workers, x, y, optimizer, scaler, clip):
    for w in workers:
        w.load_from(master)
    for w, xs, ys in zip(workers, x.chunk(len(workers)), y.chunk(len(workers))):
        w.inbox.put((xs.to(device), ys.to(device), len(x)))
    losses = [w.result() for w in workers]
    loss = torch.stack(losses).sum()
    scaler.scale(loss).backward()
    reduce_gradients(master, workers)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_(master.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--amp-dtype", choices=sorted(DTYPES), default="fp16")
    parser.add_argument("--seed", type=int, default=21)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    dtype = DTYPES[args.amp_dtype]
    master = MLP().to(device)
    labeller = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(master.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    scaler = torch.GradScaler(device=device, init_scale=2.0 ** 18, growth_interval=8,
                              enabled=args.amp_dtype == "fp16")

    workers = [Worker(rank, master, dtype) for rank in range(args.replicas)]
    for w in workers:
        w.start()
    # the bfloat16 region of the main thread must not leak into the workers
    probe = torch.randn(6, 16).to(device)
    labels = torch.zeros(6, dtype=torch.long, device=device)
    with autocast(device, dtype=torch.bfloat16):
        for w in workers:
            w.inbox.put((probe, labels, len(probe)))
        first, *others = [w.result() for w in workers]
    assert all(torch.equal(first, other) for other in others)

    for step in range(args.steps):
        x = torch.randn(args.batch_size, 16)
        with torch.no_grad():
            y = labeller(x).argmax(1)
        loss = train_step(master, workers, x, y, optimizer, scaler, clip=0.5)
        if step % 7 == 0 or step + 1 == args.steps:
            print(f"step {step} loss {loss.item()!r} scale {scaler.get_scale()!r}")

    for w in workers:
        w.inbox.put(None)
    for w in workers:
        w.join()
    blob = b"".join(t.cpu().numpy().tobytes() for t in master.state_dict().values())
    print("weights", hashlib.sha256(blob).hexdigest())


if __name__ == "__main__":
    main()
