"""Ctrl-C at any line of a comparison or a search: everything is put back, and the handler of the program is."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from tests.thorough import THOROUGH
from torch import Tensor, nn

import castwise
from castwise import Policy
from castwise.amp._emulation import SETTLED
from castwise.amp._thread_state import THREAD
from castwise.comparison._interrupts import Interrupts
from castwise.policy._bound_policy import find_bound

POLICY = Policy(compute="bfloat16", modules={"0": "float32"})
FOLDERS = ("/castwise/comparison/", "/castwise/tuning/", "/castwise/diagnosis/replay")


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    """As it does in a terminal: what is started in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target)


class InterruptedAt:
    """A trace function that sends Ctrl-C before one of the lines of castwise's comparison and search."""

    def __init__(self, line: int) -> None:
        self.lines, self._line = 0, line

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not any(folder in frame.f_code.co_filename for folder in FOLDERS):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._line:
                signal.raise_signal(signal.SIGINT)
        return self

    def count(self, run: Callable[[], object]) -> int:
        """Run something; return how many of the lines it has run."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            run()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return self.lines


def state(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    rnn = [each._flat_weights for each in model.modules() if isinstance(each, nn.RNNBase)]
    return [
        [id(tensor) for tensor in tensors],
        [tensor.tolist() for tensor in tensors],
        [[id(tensor) for tensor in weights] for weights in rnn],
        [param.grad is None for param in model.parameters()],
        ["forward" in vars(module) for module in model.modules()],
        find_bound(POLICY, model) is None,
        (THREAD.state, set(SETTLED), signal.getsignal(signal.SIGINT)),
        (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_rng_state().tolist()),
    ]


@pytest.mark.parametrize("what", ["compare", "tune"])
def test_everything_is_put_back_wherever_it_comes(what: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GRU(4, 4))
    given = [(torch.randn(3, 4), torch.arange(3)) for _ in range(2)]

    def run() -> None:
        if what == "compare":
            castwise.compare(model, given[:1], {"p": POLICY}, loss=loss, reference="float64")
        else:
            castwise.tune(model, given, loss=loss, formats=("bfloat16", "float32"))

    run()
    before = state(model)
    lines = InterruptedAt(0).count(run)
    for line in range(1, lines, lines // (60 if THOROUGH else 20)):
        InterruptedAt(line).count(run)
        assert state(model) == before, line


def test_it_is_held_back_and_let_through_where_it_may_come() -> None:
    interrupts, seen = Interrupts(), []

    def run(lets_through: bool) -> None:
        with interrupts, interrupts:
            signal.raise_signal(signal.SIGINT)
            seen.append("goes on")
            if lets_through:
                interrupts.let_through()
            seen.append("ends")

    with pytest.raises(KeyboardInterrupt):
        run(True)
    assert seen == ["goes on"]
    with pytest.raises(KeyboardInterrupt):
        run(False)
    assert seen == ["goes on", "goes on", "ends"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_gets_through_at_once() -> None:
    seen = []

    def run() -> None:
        with Interrupts():
            signal.raise_signal(signal.SIGINT)
            seen.append("goes on")
            signal.raise_signal(signal.SIGINT)
            seen.append("is not reached")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert seen == ["goes on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_is_called_and_kept() -> None:
    seen: list[int] = []

    def handler(number: int, frame: object) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with Interrupts():
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
