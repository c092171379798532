"""Runs a program of somebody else's on one side, and writes down what came of it.

    python side.py torch|run|weight-cache|install FACTS.json PROGRAM [ARGS...]

PROGRAM is a file, or `-m MODULE`. Under `run` it is the script of the command `castwise run`, and under `weight-cache`
with that option; under `install`, `castwise.install()` comes first. What is written down: each loss that `backward()`
is called on, the weights after each step of each optimizer, warnings, and what the program itself notes with
`facts.put`.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import runpy
import sys
import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # this folder last: no file of it hides a module of a program's

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import facts


def prepare() -> None:
    """Make the process deterministic."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)


def let_torchvision_load() -> list[Any]:
    """Declare the two operators without which torchvision cannot be imported beside a torch that has no CUDA.

    Its wheel is linked against CUDA, so its kernels do not load there. Models and transforms need none of them.
    """
    found = find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        return []
    try:
        ctypes.CDLL(os.path.join(found.submodule_search_locations[0], "_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return [library]
    return []


def watch() -> None:
    """Note losses, weights and warnings."""
    count: Counter[str] = Counter()
    backward, show = Tensor.backward, warnings.showwarning

    def note_loss(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        count["backward"] += 1
        facts.put(f"loss {count['backward']}", loss)
        backward(loss, *args, **kwargs)

    def note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        name = type(optimizer).__name__
        count[name] += 1
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        facts.FACTS[f"weights after {name}'s step {count[name]}"] = facts.digest(parameters)

    def note_warning(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        facts.put(f"warning: {category.__name__}: {message}", "given")
        show(message, category, *args, **kwargs)

    Tensor.backward = note_loss  # type: ignore[method-assign]
    register_optimizer_step_post_hook(note_step)
    warnings.showwarning = note_warning


def main(under: str, file: str, *program: str) -> None:
    prepare()
    kept = let_torchvision_load()
    watch()
    path = Path(file)
    rank = os.environ.get("RANK")
    path = path if rank is None else path.with_suffix(f".{rank}.json")
    atexit.register(facts.save, path)
    atexit.register(kept.clear)
    if under in ("run", "weight-cache"):
        cached = ["--weight-cache"] if under == "weight-cache" else []
        sys.argv = ["castwise", "run", *cached, "--every", "2", "--out", str(path.with_suffix(".report")), *program]
        runpy.run_module("castwise", run_name="__main__", alter_sys=True)
        return
    if under == "install":
        import castwise

        castwise.install()
    if program[0] == "-m":
        sys.argv = list(program[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(program)
        sys.path.insert(0, str(Path(program[0]).parent))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
