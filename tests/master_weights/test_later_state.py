"""State that an optimizer creates later than in its first step, for weights that `MasterWeights` steps in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.master_weights.training import SMALL_BUCKETS, Net, buckets_of, net, same_bits, train, wrapped
from torch import nn, optim

from castwise import MasterWeights


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    empty_like = torch.empty_like

    def filled(like: torch.Tensor, **options: Any) -> torch.Tensor:
        memory = empty_like(like, **options)
        return memory.fill_(1e30) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty_like", filled)


def of_user(optimizer: optim.Optimizer, model: Net) -> None:
    for param in model.parameters():
        optimizer.state[param]["mine"] = 3


def of_checkpoint(optimizer: optim.Optimizer, model: Net) -> None:
    saved = optimizer.state_dict()
    for number in range(len([*model.parameters()])):
        saved["state"].setdefault(number, {})["momentum_buffer"] = None
    optimizer.load_state_dict(saved)


def momentum_from_now_on(optimizer: optim.Optimizer, model: Net) -> None:
    train(model, optimizer, 2, start=100)
    of_user(optimizer, model)
    optimizer.param_groups[0]["momentum"] = 0.9


BEFORE: dict[str, tuple[float, Callable[[optim.Optimizer, Net], None]]] = {
    "an entry of the user": (0.9, of_user),
    "a checkpoint without momentum": (0.9, of_checkpoint),
    "momentum from a later step on": (0.0, momentum_from_now_on),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_each_part_creates_its_own_momentum(kind: str, before: str) -> None:
    momentum, prepare = BEFORE[before]
    make: Callable[..., optim.Optimizer] = lambda params: optim.SGD(params, lr=0.1, momentum=momentum, **{kind: True})  # noqa: E731
    plain = net()
    reference = make(plain.parameters())
    prepare(reference, plain)
    expected = train(plain, reference, 4)
    model, optimizer = wrapped(make)
    assert any(weight.is_cut for weight in optimizer._weights)
    prepare(optimizer, model)
    assert train(model, optimizer, 4) == expected
    assert same_bits(optimizer.fp32_state_dict(model), plain.state_dict())
    for param, of_plain in zip(model.parameters(), plain.parameters(), strict=True):
        state, of_reference = optimizer.state[param], reference.state[of_plain]
        assert [*state] == [*of_reference]
        assert torch.equal(state["momentum_buffer"], of_reference["momentum_buffer"])
        assert state.get("mine") == of_reference.get("mine")


def test_later_momentum_is_stored_in_16_bits_if_asked() -> None:
    model = nn.Linear(64, 64, bias=False)
    low = {"momentum_buffer": (torch.bfloat16, "nearest")}
    inner = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with buckets_of(SMALL_BUCKETS):
        optimizer = MasterWeights(inner, model, state_dtype=low)
    optimizer.state[model.weight]["mine"] = 3
    model.weight.grad = torch.full_like(model.weight, 0.5)
    optimizer.step()
    buffer = optimizer.state[model.weight]["momentum_buffer"]
    assert buffer.dtype is torch.bfloat16
    assert buffer.eq(0.5).all()


def test_a_step_that_fails_half_way_creates_no_state() -> None:
    model, optimizer = wrapped(lambda params: optim.SGD(params, lr=0.1, momentum=0.9))
    of_user(optimizer, model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    calls = []
    step = optim.SGD.step.__wrapped__  # type: ignore[attr-defined]

    def interrupting(self: Any, closure: None = None) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        interrupting.hooked = False  # type: ignore[attr-defined]
        patch.setattr(optim.SGD, "step", interrupting)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    unfinished = [weight for weight in optimizer._weights if weight.is_cut and weight.kept_digests is not None]
    assert all(optimizer.state[weight.param] == {"mine": 3} for weight in unfinished)
    optimizer.step()
    cut = [weight for weight in optimizer._weights if weight.is_cut]
    assert all(optimizer.state[weight.param]["momentum_buffer"].abs().amax() <= 2 for weight in cut)


def test_the_count_of_a_cut_weight_stays_where_a_cuda_graph_finds_it() -> None:
    model, optimizer = wrapped(lambda params: optim.AdamW(params, lr=0.01, fused=True))
    train(model, optimizer, 1)
    cut = [weight.param for weight in optimizer._weights if weight.is_cut]
    counts = [optimizer.state[param]["step"] for param in cut]
    assert counts
    train(model, optimizer, 2)
    for param, count in zip(cut, counts, strict=True):
        assert optimizer.state[param]["step"] is count
        assert count == 3
