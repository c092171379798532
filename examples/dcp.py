"""Save and load model, optimizer and scaler with `torch.distributed.checkpoint`, and resume bit for bit.

    torchrun --nproc-per-node 2 examples/dcp.py FOLDER            # 20 steps, a checkpoint after 10
    torchrun --nproc-per-node 2 examples/dcp.py FOLDER --resume   # the last 10 of them, from the checkpoint

DCP needs only `state_dict` and `load_state_dict`, which a scaler has: it goes into the same dictionary as the model and
the optimizer. All ranks hold the same state, so one of them writes it.
"""

from __future__ import annotations

import argparse
import hashlib
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import castwise

STEPS, SAVED_AFTER = 20, 10


def build(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model sharded over the ranks, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def main() -> None:
    """Train, or resume training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group()
    model, optimizer = build(device)
    scaler = castwise.ShardedGradScaler(device, init_scale=2.0**20, growth_interval=4)
    first = 0
    if options.resume:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer, "scaler": scaler.state_dict()}
        dcp.load(state, checkpoint_id=options.folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        first = SAVED_AFTER
    for step in range(first, STEPS):
        torch.manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(8, 16, device=device)
        with castwise.autocast(device, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step + 1 == SAVED_AFTER and not options.resume:
            of_model, of_optimizer = get_state_dict(model, optimizer)
            state = {"model": of_model, "optimizer": of_optimizer, "scaler": scaler.state_dict()}
            dcp.save(state, checkpoint_id=options.folder)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().cpu().numpy().tobytes())
    if dist.get_rank() == 0:
        print(f"scale {scaler.get_scale():g} skipped {scaler.state_dict()['steps_skipped']}")
        print(f"weights {digest.hexdigest()}")
    else:
        scaler.state_dict()  # on every rank: it reads pending step results, which may need communication
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
