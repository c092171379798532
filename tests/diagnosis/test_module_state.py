"""A diagnosis leaves no trace in what a model keeps beside its parameters and buffers, or is not made."""

from __future__ import annotations

import multiprocessing
import queue
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from castwise import Monitor
from castwise.diagnosis import _replay

State = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, uses: State) -> None:
        super().__init__()
        self.linear, self.uses = nn.Linear(3, 3), uses
        self.calls, self.names = 0, {"calls": [0]}
        self.recent: deque[Tensor] = deque([torch.zeros(3)], maxlen=4)
        self.seen: set[int] = set()
        self.mean = torch.zeros(3)
        self.own, self.numpy, self.python = torch.Generator().manual_seed(0), np.random.default_rng(0), random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.uses(self, self.linear(x))


def counter(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    net.names["calls"][0] += 1
    net.seen.add(net.calls)
    return x * (net.calls + net.names["calls"][0] + len(net.seen)) ** 0.1


def queue_of_features(net: Net, x: Tensor) -> Tensor:
    net.recent.append(x.detach().nan_to_num().mean(0))
    return x + torch.stack(list(net.recent)).mean(0)


def tensor_in_place(net: Net, x: Tensor) -> Tensor:
    net.mean.mul_(0.9).add_(x.detach().nan_to_num().mean(0))
    return x + net.mean


def own_generators(net: Net, x: Tensor) -> Tensor:
    return x + torch.rand(3, generator=net.own) + net.numpy.random() + net.python.random()


def later_layer(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    if net.calls == 4 and not hasattr(net, "later"):  # in a replay of the third step
        net.later = nn.Linear(3, 3)
    return net.later(x) if hasattr(net, "later") else x


def exits(net: Net, x: Tensor) -> Tensor:
    net.calls += int(not x.isfinite().all())
    if net.calls > 1:
        sys.exit("too many batches with NaN")
    return x


def trained(uses: State, *, watched: bool, hook: bool = False) -> tuple[list[float], list[str]]:
    """Train six steps, of which the third has a NaN, and repair the weights; return losses, and what was warned of."""
    torch.manual_seed(0)
    net, kept = Net(uses), [0.0]

    def clip(gradient: Tensor) -> Tensor:
        kept[0] = 0.9 * kept[0] + float(gradient.nan_to_num().norm())
        return gradient / (1 + kept[0])

    if hook:
        net.linear.weight.register_hook(clip)
        net.linear.register_full_backward_hook(lambda *_: kept.__setitem__(0, kept[0] + 1.0))
        net.linear.register_full_backward_pre_hook(lambda *_: kept.__setitem__(0, kept[0] + 1.0))
    optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
    watch = Monitor(net, optimizer, on_nonfinite="diagnose", sinks=[]) if watched else nullcontext()
    with warnings.catch_warnings(record=True) as caught, watch:
        warnings.simplefilter("always")
        for step in range(6):
            x, before = torch.randn(4, 3), [param.detach().clone() for param in net.linear.parameters()]
            if step == 2:
                x[1, 0] = torch.nan
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step == 2:
                for param, values in zip(net.linear.parameters(), before, strict=True):
                    param.data.copy_(values)
    return losses, [str(each.message) for each in caught if "could not be diagnosed" in str(each.message)]


@pytest.mark.parametrize("uses", [counter, queue_of_features, tensor_in_place, own_generators, later_layer, exits])
def test_a_diagnosis_leaves_no_trace_in_the_attributes_of_modules(uses: State) -> None:
    (plain, _), (watched, said) = trained(uses, watched=False), trained(uses, watched=True)
    assert plain[3:] == watched[3:]
    assert len(said) == (uses is exits)
    assert all(text.endswith("UnrepeatableError: it called sys.exit") for text in said)


def test_a_diagnosis_leaves_no_trace_in_hooks_of_gradients() -> None:
    def root_of_zero(_: Any, x: Tensor) -> Tensor:
        return x.nan_to_num().abs().sqrt()

    (plain, _), (watched, said) = (trained(root_of_zero, watched=each, hook=True) for each in (False, True))
    assert repr(plain) == repr(watched)
    assert said == []


def test_a_model_that_draws_from_an_iterator_is_not_replayed() -> None:
    def draws(net: Net, x: Tensor) -> Tensor:
        net.numbers = net.numbers if hasattr(net, "numbers") else iter(range(6))
        return x * next(net.numbers)

    (plain, _), (watched, said) = trained(draws, watched=False), trained(draws, watched=True)
    assert plain[3:] == watched[3:]
    assert said == [
        "step 3 could not be diagnosed: UnrepeatableError: the forward may use up numbers, which is a range_iterator"
    ]


@pytest.mark.parametrize(
    ("make", "method"),
    [(queue.Queue, "get"), (multiprocessing.Queue, "get"), (multiprocessing.SimpleQueue, "recv_bytes")],
)
def test_a_replay_does_not_wait_for_a_queue_that_a_forward_takes_from(make: Callable[[], Any], method: str) -> None:
    def factor(_: Any, x: Tensor) -> Tensor:
        return x * factors.get()

    results = []
    for is_watched in (False, True):
        factors = make()
        for number in range(6):
            factors.put(number)
        results.append(trained(factor, watched=is_watched))
    (plain, _), (watched, said) = results
    assert plain[3:] == watched[3:]
    why = f"it calls {method} of a queue or a pipe, which others use"
    assert said == [f"step 3 could not be diagnosed: UnrepeatableError: {why}"]


@pytest.mark.usefixtures("group")
def test_a_rank_does_not_replay_alone_what_needs_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def averaged(_: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += not _replay.is_replaying()
        torch.distributed.all_reduce(x.detach().clone())
        calls += _replay.is_replaying()  # not reached
        return x

    monkeypatch.setattr(_replay, "has_several_ranks", lambda: True)
    _, said = trained(averaged, watched=True)
    assert calls == 6
    assert said == [
        "step 3 could not be diagnosed: UnrepeatableError: its allreduce_ needs the other ranks, which do not replay it"
    ]
