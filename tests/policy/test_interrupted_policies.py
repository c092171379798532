"""An interrupt while a policy or one of its rules is entered: whatever the line, the thread's state is as before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import Policy
from castwise._torch_private import function_modes
from castwise.amp import _traced_region
from castwise.amp.thread_state import THREAD
from castwise.policy import bound_policy, casting, op_rules
from castwise.policy.casting import native_state_of

X = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
FILES = {module.__file__ for module in (bound_policy, op_rules, casting, _traced_region)}


def thread_state() -> tuple[Any, ...]:
    backwards = sys.modules["torch._functorch.config"].backward_pass_autocast
    return THREAD.state, native_state_of("cpu"), native_state_of("cuda"), function_modes(), backwards


class Interrupt:
    """Raises at the so many-th line that a policy executes before the code of a layer begins."""

    def __init__(self, line: int) -> None:
        self._left, self.is_raised, self._is_over = line, False, False

    def __enter__(self) -> None:
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: Any, event: str, arg: object) -> Any:
        code = frame.f_code
        self._is_over |= code.co_name in {"forward", "linear"}
        is_ours = code.co_filename in FILES or code is TorchFunctionMode.__enter__.__code__
        return self._ran if is_ours and not self._is_over else None

    def _ran(self, frame: Any, event: str, arg: object) -> Any:
        self._left -= event == "line" and not self._is_over
        if self._left == 0 and not self.is_raised:
            self.is_raised = True
            raise KeyboardInterrupt
        return self._ran


def lines_before(run: Callable[[], object]) -> int:
    """Interrupt `run` at each line in turn, check that the state is as before, and return how many lines there are."""
    run()  # what it imports is not traced
    for line in range(1, 1000):
        before, interrupt = thread_state(), Interrupt(line)
        try:
            with interrupt:
                run()
        except KeyboardInterrupt:
            pass
        assert thread_state() == before, f"line {line}"
        if not interrupt.is_raised:
            return line - 1
    raise AssertionError("no end")


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 2, 32, batch_first=True, dropout=0.0).eval()


RECIPE = {"modules": {"": "mxfp8"}, "backend": "emulated"}
LAYERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "a dtype": (lambda: nn.Linear(32, 32), {"modules": {"": "float32"}}),
    "a dtype, 16-bit weights": (lambda: nn.Linear(32, 32).bfloat16(), {"modules": {"": "float32"}}),
    "a fast path that is not taken": (encoder, {"modules": {"linear1": "float32"}}),
    "a fast path in spite of op rules": (encoder, {"ops": {"softmax": "float32"}}),
    "a recipe": (lambda: nn.Linear(32, 32), RECIPE),
    "a recipe and op rules": (lambda: nn.Linear(32, 32), {**RECIPE, "ops": {"gelu": "float32"}}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_is_interrupted_before_it_begins_leaves_nothing_behind(name: str) -> None:
    make, fields = LAYERS[name]
    model = make()
    bound = Policy(compute="bfloat16", **fields).bind(model)
    with torch.no_grad(), castwise.autocast("cpu", policy=bound):
        assert lines_before(lambda: model(X)) > 20
        model(X)
        assert THREAD.state.bound is bound
    assert thread_state()[0] is None


def test_a_forward_that_is_run_again_and_interrupted_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Softmax(-1))
    bound = Policy(compute="bfloat16", modules={"0": "float32"}, ops={"softmax": "float32"}).bind(model)

    def run() -> None:
        tracer = sys.gettrace()
        sys.settrace(None)
        with castwise.autocast("cpu", policy=bound):
            loss = checkpoint(model[0], X, use_reentrant=False, context_fn=bound.checkpoint_contexts).sum()
        sys.settrace(tracer)
        loss.backward()

    assert lines_before(run) > 30


def test_a_region_that_is_interrupted_while_its_policy_is_entered_is_not_entered() -> None:
    model = nn.Linear(32, 32)
    bound = Policy(compute="bfloat16", modules={"": "float32"}, ops={"softmax": "float32"}).bind(model)

    def run() -> None:
        with castwise.autocast("cpu", policy=bound):
            forward()

    def forward() -> None:
        """Its name ends the search for lines."""

    assert lines_before(run) > 10
    outer = Policy(compute="float16", ops={"gelu": "float32"}).bind(model)
    with castwise.autocast("cpu", policy=outer):
        lines_before(run)
        assert THREAD.state.bound is outer


@pytest.mark.parametrize("owner", [TorchFunctionMode, bound_policy])
def test_a_context_that_fails_to_be_entered_leaves_nothing_behind(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(32, 32).bfloat16())
    bound = Policy(compute="bfloat16", modules={"0": "float32"}).bind(model)
    with torch.no_grad(), castwise.autocast("cpu", policy=bound):
        before = thread_state()
        name = "__enter__" if owner is TorchFunctionMode else "set_native_state"

        def fails(*_: Any) -> None:
            raise RuntimeError("no")

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails)
            with pytest.raises(RuntimeError, match=r"^no$"):
                model(X)
        assert thread_state() == before
        assert model(X).dtype is torch.float32
