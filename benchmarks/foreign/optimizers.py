"""Every optimizer of a library trains a small model in fp16, in each of its forms, with an overflow and with clipping.

python side.py torch|run FACTS.json optimizers.py torch|pytorch_optimizer torch|castwise

The last argument says whose region and scaler: torch's own, which `run` replaces, or castwise's.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import castwise
import facts

STEPS = 5
OVERFLOWS, UNSCALED = 1, (2, 3)  # steps
NEEDED: dict[str, dict[str, Any]] = {"Ranger21": {"num_iterations": STEPS}, "BSAM": {"num_data": 4}}
MATRICES_ONLY = {"Muon", "SpectralSphere"}
TOLD_WHICH = {"AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon"}  # of pytorch_optimizer
Make = Callable[[nn.Module], torch.optim.Optimizer]


def of_torch() -> Iterator[tuple[str, Make]]:
    """Yield every optimizer with every set of options in torch's own database of them, in each form."""
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        for form in ("for-loop", *info.supported_impls):
            if form == "differentiable":
                continue  # no leaf can be stepped in place with it
            flags = {"foreach": form == "foreach"} if "foreach" in info.supported_impls else {}
            flags |= {form: True} if form != "for-loop" else {}
            for entry in info.optim_inputs_func(device="cpu"):
                options = {**entry.kwargs, **flags}
                yield f"{info.optim_cls.__name__}, {form}, {entry.desc}", _maker(info.optim_cls, options)


def of_pytorch_optimizer() -> Iterator[tuple[str, Make]]:
    """Yield every optimizer of pytorch_optimizer with the options it has by default, and in its foreach form."""
    import pytorch_optimizer

    for name in sorted(pytorch_optimizer.get_supported_optimizers()):
        cls = pytorch_optimizer.load_optimizer(name)
        for form, options in (("default", {}), ("foreach", {"foreach": True})):
            yield f"{cls.__name__}, {form}", _maker(cls, {**NEEDED.get(cls.__name__, {}), **options})


LIBRARIES = {"torch": of_torch, "pytorch_optimizer": of_pytorch_optimizer}


def _maker(cls: Any, options: dict[str, Any]) -> Make:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        matrices = [each for each in parameters if each.ndim == 2]
        if cls.__name__ in TOLD_WHICH and cls.__module__.startswith("pytorch_optimizer"):
            vectors = [each for each in parameters if each.ndim != 2]
            groups = [{"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}]
            return cls(groups, **options)  # type: ignore[no-any-return]
        return cls(matrices if cls.__name__ in MATRICES_ONLY else parameters, **options)  # type: ignore[no-any-return]

    return make


def train(name: str, make: Make, amp: Any) -> None:
    """Note loss, scale and weights of each step; an optimizer that wants more than this raises, and is noted so."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True)) if name.startswith("SparseAdam") else model
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some print how they are set
            optimizer = make(model)
        scaler = amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        for step in range(STEPS):
            x = torch.randn(4, 8)
            with amp.autocast("cpu", dtype=torch.float16):
                y = model(x.argsort() if name.startswith("SparseAdam") else x)
                loss = nn.functional.mse_loss(y.float(), x[:, :4])
            loss = loss * (1e38 if step == OVERFLOWS else 1.0)
            scaler.scale(loss).backward()
            if step in UNSCALED:
                scaler.unscale_(optimizer)
            if step in UNSCALED and not name.startswith("SparseAdam"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            weights = facts.digest(model.parameters())
            facts.put(f"{name}: step {step}", f"loss {loss.item()}, scale {scaler.get_scale()}, weights {weights}")
    except Exception as error:
        facts.put(f"{name}: raises", f"{type(error).__name__}: {error}")


def main(library: str, whose: str) -> None:
    amp: Any = torch.amp if whose == "torch" else castwise
    for name, make in LIBRARIES[library]():
        train(name, make, amp)


if __name__ == "__main__":
    main(*sys.argv[1:])
