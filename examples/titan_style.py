"""A loop in the style of torchtitan: settings in a dataclass, a 2-D mesh, compiled blocks, accumulation, a monitor.

    torchrun --nproc-per-node 4 examples/titan_style.py [FOLDER]

One dimension of the mesh replicates the model, the other shards it (HSDP). Blocks are compiled one by one before they
are sharded. Gradients are accumulated over micro-batches and reduced after the last one. The scaler gets the whole
mesh, so all ranks decide together. The monitor records to FOLDER: `castwise report FOLDER`.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import castwise


@dataclass(kw_only=True, slots=True)
class Settings:
    """Settings of the run.

    Args:
        replicate: Number of replicas of the model; the other ranks shard it.
        steps: Number of optimizer steps.
        micro_batches: Number of micro-batches per step.
        batch: Rows in each micro-batch of a rank.
        max_norm: Largest gradient norm.
        compile_backend: Backend of `torch.compile` for the blocks.
    """

    replicate: int = 2
    steps: int = 10
    micro_batches: int = 2
    batch: int = 4
    width: int = 32
    layers: int = 2
    lr: float = 3e-3
    max_norm: float = 1.0
    compile_backend: str = "aot_eager"


class Block(nn.Module):
    """A layer: a norm, two products, a sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus what the layer adds, shape (..., width)."""
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def parallelize(model: nn.Sequential, mesh: DeviceMesh, settings: Settings) -> None:
    """Compile the blocks and shard the model: weights are gathered in bf16, gradients reduced in fp32."""
    mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        block.compile(backend=settings.compile_backend, fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=mp_policy)
    fully_shard(model, mesh=mesh, mp_policy=mp_policy)


def main(settings: Settings, folder: str | None) -> None:
    """Train on all ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group()
    shape = (settings.replicate, dist.get_world_size() // settings.replicate)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(settings.width) for _ in range(settings.layers))).to(device)
    parallelize(model, mesh, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=settings.steps)
    # bf16 needs no scaling: Guard skips bad batches and provides the norm, causes and records.
    scaler = castwise.ShardedGradScaler(device, schedule=castwise.schedules.Guard(), process_group=mesh)
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.enter_context(castwise.Monitor(model, optimizer, scaler, every=5, sinks=[folder]))
        for step in range(settings.steps):
            total = torch.zeros((), device=device)
            for micro_batch in range(settings.micro_batches):
                is_last = micro_batch == settings.micro_batches - 1
                model.set_requires_gradient_sync(is_last)
                torch.manual_seed(10_000 * step + 100 * micro_batch + dist.get_rank())
                x = torch.randn(settings.batch, settings.width, device=device)
                loss = nn.functional.mse_loss(model(x).float(), x.roll(1, 1)) / settings.micro_batches
                scaler.scale(loss).backward()
                total += loss.detach()
            norm = scaler.clip_grad_norm_(optimizer, settings.max_norm)
            scaler.step(optimizer)
            scaler.step_scheduler(schedule)
            scaler.update()
            optimizer.zero_grad()
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"step {step + 1} loss {total.item() / dist.get_world_size():.4f} norm {norm.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Settings(), sys.argv[1] if len(sys.argv) > 1 else None)
