"""Compare recipes on a GPU's tensor cores with bf16: computed by castwise on torch's kernels, and by torchao.

    python -m benchmarks.recipe_speed --device cuda --full

Times forward and backward of an MLP's two linear layers, compiled, in turns. Writes results/recipe_speed-cuda.json.
Without --full, layers are small and not compiled. Without torchao, the others are measured. `make gpu` runs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import castwise
from benchmarks.machine import machine
from benchmarks.pairing import Rounds, race, ratio, seconds
from castwise._recipes.recipe import RECIPES, runs_natively

RESULTS = Path(__file__).parent / "results"
NAMES = ("float8_tensorwise", "float8_rowwise")
BF16 = "bf16"


def step_of(name: str, by: str, device: str, width: int, rows: int, *, compiled: bool) -> Callable[[], None]:
    """Return a function that runs forward and backward.

    Args:
        name: A recipe, or `BF16`.
        by: "castwise", "torchao" or, in bf16, "torch".
        device: "cuda".
        width: The outer size of the layers; the inner one is four times as large.
        rows: Rows of the batch.
        compiled: Whether to compile the model.
    """
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(device)
    is_native = name != BF16 and runs_natively(RECIPES[name], device)
    region: Any = lambda: torch.autocast(device, dtype=torch.bfloat16)  # noqa: E731
    if by == "castwise":
        backend = "auto" if is_native else "emulated"
        bound = castwise.Policy(compute="bfloat16", modules={nn.Linear: name}, backend=backend).bind(model)
        region = lambda: castwise.autocast(device, policy=bound)  # noqa: E731
    elif by == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(name.removeprefix("float8_"))
        model = convert_to_float8_training(model, config=dataclasses.replace(config, emulate=not is_native))
    run: Any = torch.compile(model) if compiled else model
    x, grad = (torch.randn(rows, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def step() -> None:
        model.zero_grad()
        with region():
            output = run(x)
        output.backward(grad.to(output.dtype))

    return step


def compared(name: str, device: str, *, full: bool) -> dict[str, Any]:
    """Return the milliseconds of a recipe, computed by castwise and by torchao, and their ratios to bf16."""
    width, rows, rounds = (4096, 8192, Rounds(25, 5.0)) if full else (128, 64, Rounds(9, 1.0))
    has_torchao = importlib.util.find_spec("torchao") is not None
    ways = [(BF16, "torch"), (name, "castwise"), *([(name, "torchao")] if has_torchao else [])]
    steps = {by: step_of(kind, by, device, width, rows, compiled=full) for kind, by in ways}
    times = race({by: functools.partial(seconds, step, device, 3) for by, step in steps.items()}, rounds)
    return {
        "width": width,
        "rows": rows,
        "compiled": full,
        "torchao": "measured" if has_torchao else "not installed",
        "ms": {by: 1e3 * statistics.median(of_way) for by, of_way in times.items()},
        "times bf16": {by: ratio(times[by], times["torch"]) for by in times if by != "torch"},
    }


def main(arguments: Sequence[str] | None = None, folder: Path = RESULTS) -> None:
    """Measure, and write the result after each recipe."""
    about, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser("python -m benchmarks.recipe_speed", description=about)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--full", action="store_true", help="large layers, compiled")
    options = parser.parse_args(arguments)
    full = " --full" if options.full else ""
    command = f"python -m benchmarks.recipe_speed --device {options.device}{full}"
    record: dict[str, Any] = {"machine": machine(options.device, command), "recipes": {}}
    for name in NAMES:
        record["recipes"][name] = compared(name, options.device, full=options.full)
        print(name, json.dumps(record["recipes"][name], indent=2), flush=True)
        (folder / f"recipe_speed-{options.device}.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
