"""Names for `--help` and shell completion.

They are repeated here because importing the modules that define them would import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

COSTS = ("flops", "bytes", "measured")
DEVICES = ("cpu", "cuda")
FORMATS = ("float16", "bfloat16", "float32")
RECIPES = (
    "float8_tensorwise",
    "float8_rowwise",
    "float8_rowwise_with_gw_hp",
    "float8_blockwise",
    "mxfp8",
    "nvfp4",
)
LEVELS: tuple[Literal["mistake"], Literal["warning"], Literal["critical"]] = ("mistake", "warning", "critical")
POLICIES = ("bf16", "bf16_stable", "fp16", "fp16_stable")
RECORDS = "monitor.jsonl.gz"
RUNS = "castwise-run"
"""The folder of runs of `castwise run` and `castwise report`."""
REFERENCES = ("float32", "float64")
SCHEDULES = ("Dynamic", "Guard", "Headroom", "Static")
WEIGHTS = ("fp32", "bf16-split")
VARIATIONS = ("batch_size", "batch_order")


def completing(*names: str) -> Callable[[str], list[str]]:
    """Return a function that completes the start of one of the names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def complete_policy(incomplete: str) -> list[str]:
    """Complete the name of a policy, or of a policy file in the current folder."""
    files = [path.name for path in Path().iterdir() if path.suffix in {".toml", ".json"}]
    return completing(*POLICIES, *sorted(files))(incomplete)
