"""Ray Train: two workers on CPUs, of which one ends in the middle; Ray restarts them from the last checkpoint.

    pip install "castwise[report]" "ray[train]"
    python examples/ray_train.py FOLDER

Each attempt is a run of castwise in FOLDER/castwise, with a record for each worker and a report.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn

import castwise

STEPS, FAILS_AT = 40, 25


def train(config: dict[str, Any]) -> None:
    """Train on one worker; fails once."""
    castwise.install(out=config["out"], on_nonfinite="diagnose")
    try:
        torch.manual_seed(0)
        model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        first = 1
        if (checkpoint := ray.train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                saved = torch.load(Path(folder, "state.pt"))
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            first = saved["step"] + 1
        generator = torch.Generator().manual_seed(ray.train.get_context().get_world_rank())
        for step in range(first, STEPS + 1):
            inputs = torch.randn(16, 8, generator=generator)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(inputs) - inputs.sum(-1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                _report(step, loss, model, optimizer)
            if step == FAILS_AT and first == 1:
                raise RuntimeError("a worker is lost")
    finally:
        castwise.uninstall()


def _report(step: int, loss: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with tempfile.TemporaryDirectory() as folder:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, Path(folder, "state.pt"))
        is_first = ray.train.get_context().get_world_rank() == 0
        checkpoint = ray.train.Checkpoint.from_directory(folder) if is_first else None
        ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)


def main() -> None:
    """Train, and print what castwise has recorded."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()).absolute()
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"out": str(folder / "castwise")},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False),
        run_config=ray.train.RunConfig(
            name="castwise", storage_path=str(folder / "ray"), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.4f}")
    for run in sorted(path for path in (folder / "castwise").iterdir() if path.name[0].isdigit()):
        records = sorted(path.parent.name for path in run.rglob("monitor.jsonl.gz"))
        print(f"run with {', '.join(records)}{', report.html' if (run / 'report.html').exists() else ''}")


if __name__ == "__main__":
    main()
