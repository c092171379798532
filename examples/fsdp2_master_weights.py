"""FSDP2 with bf16 weights that train as if they were fp32: each rank stores and gathers half the bytes.

    torchrun --nproc-per-node 2 examples/fsdp2_master_weights.py FOLDER

FSDP2 gathers the weights of a unit in one dtype. Norms stay in fp32, so they get their own units. `MasterWeights`
comes after `fully_shard`, which replaces the parameters. The saved file is the checkpoint of an fp32 model.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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


def main(folder: str) -> None:
    """Train on all ranks, and save the fp32 weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(Block(32), Block(32), nn.Linear(32, 1)).to(device)
    averaged = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # gradients are averaged in fp32, then rounded
    for block in model[:2]:
        fully_shard(block.norm, mesh=mesh)
        fully_shard(block, mesh=mesh, mp_policy=averaged)
    fully_shard(model, mesh=mesh, mp_policy=averaged)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = castwise.MasterWeights(adamw, model, dtype=torch.bfloat16)
    for step in range(20):
        torch.manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(64, 32, device=device)
        with castwise.autocast(device, dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), x[:, :1])
        optimizer.zero_grad()
        loss.backward()
        norm = optimizer.clip_grad_norm_(max_norm=1.0)  # over all ranks, in fp32
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.4f} norm {norm.item():.4f}", flush=True)
    if dist.get_rank() == 0:
        memory = optimizer.memory()
        stored = sum(memory[what] for what in ("weights", "kept", "gradients", "state"))
        print(f"{stored / memory['parameters']:.1f} bytes for each of {memory['parameters']} parameters on this rank")
    dcp.save({"model": optimizer.fp32_state_dict(model)}, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
