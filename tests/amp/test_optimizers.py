"""Every optimizer of `torch.optim`, in every implementation it has: the same training as under torch's scaler."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from castwise.amp.grad_scaler import GradScaler

CLASSES = sorted(
    (cls for cls in vars(torch.optim).values() if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)),
    key=lambda cls: cls.__name__,
)
# The base class does not step, and LBFGS needs a closure.
CLASSES = [cls for cls in CLASSES if cls not in (torch.optim.Optimizer, torch.optim.LBFGS)]


def implementations(cls: type[torch.optim.Optimizer]) -> dict[str, dict[str, bool]]:
    accepted = inspect.signature(cls).parameters
    found = {"for-loop": {"foreach": False} if "foreach" in accepted else {}}
    return found | {name: {name: True} for name in ("foreach", "fused", "capturable") if name in accepted}


CASES = [
    pytest.param(cls, flags, id=f"{cls.__name__}-{name}")
    for cls in CLASSES
    for name, flags in implementations(cls).items()
]
ON_A_CPU = [case for case in CASES if "capturable" not in case.values[1]]


def train(
    cls: type[torch.optim.Optimizer], flags: dict[str, bool], scaler: Any, device: str
) -> tuple[list[Any], list[float]]:
    """Nine iterations with an inf in the fifth and clipping in the eighth; returns all bits, and the scales."""
    params = [torch.nn.Parameter(torch.linspace(-1.0, 1.0, 8).view(4, 2).to(device)) for _ in range(2)]
    optimizer = cls(params, lr=0.05, **flags)  # type: ignore[call-arg]
    scales = []
    rows = torch.tensor([0, 3, 3], device=device)
    for step in range(9):
        optimizer.zero_grad()
        loss = torch.zeros((), device=device)
        for param in params:
            if cls is torch.optim.SparseAdam:
                loss = loss + torch.nn.functional.embedding(rows, param, sparse=True).sum()
            else:
                loss = loss + (param * (step + 1)).sin().sum()
        scaler.scale(loss * (torch.inf if step == 4 else 1.0)).backward()
        if step == 7:
            scaler.unscale_(optimizer)
            for param in params:
                param.grad *= 0.25
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    state = [optimizer.state[param] for param in params]
    flat = [value.tolist() if isinstance(value, torch.Tensor) else value for entry in state for value in entry.values()]
    return [*(param.tolist() for param in params), *flat, scaler.state_dict()], scales


def compare(cls: type[torch.optim.Optimizer], flags: dict[str, bool], device: str) -> None:
    expected = train(cls, flags, torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=3), device)
    got = train(cls, flags, GradScaler(device, init_scale=2.0**10, growth_interval=3), device)
    assert got == expected
    assert got[1][3:5] == [2.0**11, 2.0**10], "the inf in the fifth iteration was not met"


@pytest.mark.parametrize(("cls", "flags"), ON_A_CPU)
def test_the_same_training_as_under_torchs_scaler(cls: type[torch.optim.Optimizer], flags: dict[str, bool]) -> None:
    compare(cls, flags, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("cls", "flags"), CASES)
def test_the_same_training_as_under_torchs_scaler_on_a_gpu(
    cls: type[torch.optim.Optimizer], flags: dict[str, bool]
) -> None:
    compare(cls, flags, "cuda")


def test_the_list_of_optimizers_is_not_empty_or_guessed() -> None:
    assert {torch.optim.SGD, torch.optim.AdamW, torch.optim.SparseAdam, torch.optim.Adafactor} <= set(CLASSES)
    assert {name for cls in CLASSES for name in implementations(cls)} == {"for-loop", "foreach", "fused", "capturable"}


def test_lbfgs_is_refused_with_its_closure() -> None:
    scaler, param = GradScaler("cpu"), torch.nn.Parameter(torch.ones(2))
    scaler.scale(param.sum()).backward()
    with pytest.raises(RuntimeError, match="LBFGS"):
        scaler.step(torch.optim.LBFGS([param]), lambda: 0.0)
