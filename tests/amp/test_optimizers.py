"""Every optimizer of `torch.optim`, in every implementation it has: the same training as under torch's scaler."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from castwise.amp._checkpoint import KEYS
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
    flat = [bits(value) for entry in state for value in entry.values()]
    return [*(bits(param.detach()) for param in params), *flat, {key: scaler.state_dict()[key] for key in KEYS}], scales


def bits(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, tuple(value.shape), value.cpu().contiguous().view(-1).view(torch.uint8).tolist()


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


# -- clipping ---------------------------------------------------------------------------------------------------------


def clip_as_torch_does(scaler: Any, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    scaler.unscale_(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params]
    if not any(grad.is_sparse for grad in grads):
        return torch.nn.utils.clip_grad_norm_(params, max_norm)
    # torch has no norm of sparse gradients.
    norm = torch.stack([grad.coalesce().values().norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def train_clipped(
    cls: type[torch.optim.Optimizer], flags: dict[str, bool], scaler: Any, device: str
) -> tuple[list[torch.Tensor], list[float], list[float]]:
    """Forty clipped iterations, three of them with an inf or a NaN; returns the parameters, norms and scales."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=draw).to(device)) for shape in [(8, 2), (8, 2)]]
    optimizer = cls(params, lr=0.01, **flags)  # type: ignore[call-arg]
    norms, scales = [], []
    for step in range(40):
        optimizer.zero_grad()
        losses = []
        for param in params:
            used = param
            if cls is torch.optim.SparseAdam:
                rows = torch.randint(8, (5,), generator=draw).to(device)
                used = torch.nn.functional.embedding(rows, param, sparse=True)
            losses.append(((used - torch.randn(used.shape, generator=draw).to(device)) ** 2).sum())
        spoil = {10: torch.inf, 20: torch.nan, 21: -torch.inf}.get(step, 1.0 if step % 3 else 0.1)
        scaler.scale(sum(losses) * spoil).backward()
        if isinstance(scaler, GradScaler):
            norm = scaler.clip_grad_norm_(optimizer, 5.0)
        else:
            norm = clip_as_torch_does(scaler, optimizer, 5.0)
        norms.append(norm.item())
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [param.detach() for param in params], norms, scales


def compare_clipped(cls: type[torch.optim.Optimizer], flags: dict[str, bool], device: str) -> None:
    theirs = train_clipped(cls, flags, torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=4), device)
    ours = train_clipped(cls, flags, GradScaler(device, init_scale=2.0**10, growth_interval=4), device)
    assert ours[2] == theirs[2], "the same steps are skipped"
    assert len(set(theirs[2])) > 4
    assert any(norm > 6.0 for norm in theirs[1])
    assert any(norm < 5.0 for norm in theirs[1])
    finite = [pair for pair in zip(ours[1], theirs[1], strict=True) if pair[1] < torch.inf]
    assert len(finite) == 37
    for our_norm, their_norm in finite:
        assert our_norm == pytest.approx(their_norm, rel=1e-6)
    for our_param, their_param in zip(ours[0], theirs[0], strict=True):
        assert (our_param - their_param).norm() <= 1e-6 * their_param.norm()


@pytest.mark.parametrize(("cls", "flags"), ON_A_CPU)
def test_clipped_steps_are_those_of_torch(cls: type[torch.optim.Optimizer], flags: dict[str, bool]) -> None:
    compare_clipped(cls, flags, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("cls", "flags"), CASES)
def test_clipped_steps_are_those_of_torch_on_a_gpu(cls: type[torch.optim.Optimizer], flags: dict[str, bool]) -> None:
    compare_clipped(cls, flags, "cuda")
