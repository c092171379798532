"""FSDP2 with a policy: one place sets the dtype of each module, for autocast and for sharding.

    torchrun --nproc-per-node 2 examples/fsdp2.py

`Policy.fsdp` yields each unit with the `MixedPrecisionPolicy` that gathers its weights in the dtype it computes in, so
gathered weights need no cast. The gradient norm is that of all ranks, and all ranks take or skip the same steps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import castwise


class Block(nn.Module):
    """A layer of a small network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus what the layer adds, shape (..., width)."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Some blocks and a head that stays in fp32."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number for each row of x, shape (n, 1)."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    """Train on all ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Net().to(device)
    policy = castwise.Policy(compute="bfloat16", modules={"head": "float32"})
    for unit, mp_policy in policy.fsdp(model, units=[nn.LayerNorm, Block, "head"]):
        fully_shard(unit, mesh=mesh, mp_policy=mp_policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # bf16 needs no scaling; Guard skips non-finite steps on all ranks and reports the cause.
    scaler = castwise.ShardedGradScaler(device, schedule=castwise.schedules.Guard())
    bound = policy.bind(model)
    for step in range(20):
        torch.manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(16, 32, device=device)
        if step == 10 and dist.get_rank() == 1:
            x[0, 0] = float("nan")  # a bad batch on one rank
        with castwise.autocast(device, policy=bound):
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        scaler.scale(loss).backward()
        norm = scaler.clip_grad_norm_(optimizer, max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            skipped = " skipped" if scaler.step_skipped else ""
            print(f"step {step + 1} loss {loss.item():.4f} norm {norm.item():.4f}{skipped}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
