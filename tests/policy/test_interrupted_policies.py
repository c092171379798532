"""An interrupt while a policy is entered, or a rule entered or left: whatever the line, all state is as before."""

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
from castwise import Policy, _torch_private
from castwise._torch_private import function_modes
from castwise.amp import _traced_region
from castwise.amp._thread_state import THREAD
from castwise.policy import _bound_policy as bound_policy
from castwise.policy import _casting as casting
from castwise.policy import _op_rules as op_rules
from castwise.policy import _policy_state as policy_state
from castwise.policy import _ruled_forward as ruled_forward
from castwise.policy._casting import native_state_of

X = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
FILES = {module.__file__ for module in (bound_policy, ruled_forward, policy_state, op_rules, casting, _traced_region)}


OF_MODES = {TorchFunctionMode.__enter__.__code__, TorchFunctionMode.__exit__.__code__}


def thread_state() -> tuple[Any, ...]:
    backwards = sys.modules["torch._functorch.config"].backward_pass_autocast
    return THREAD.state, native_state_of("cpu"), native_state_of("cuda"), function_modes(), backwards


class Interrupt:
    """Raises at the so many-th line that a policy executes before the code of a layer begins, or after it has ended."""

    def __init__(self, line: int, *, is_after: bool) -> None:
        self._left, self.is_raised, self._is_after, self._counts = line, False, is_after, not is_after

    def __enter__(self) -> None:
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: Any, event: str, arg: object) -> Any:
        code = frame.f_code
        if code.co_name in {"forward", "linear"}:
            self._counts = False
            return self._in_layer if self._is_after else None
        return self._ran if code.co_filename in FILES or code in OF_MODES else None

    def _in_layer(self, frame: Any, event: str, arg: object) -> Any:
        self._counts |= event == "return"
        return self._in_layer

    def _ran(self, frame: Any, event: str, arg: object) -> Any:
        self._left -= event == "line" and self._counts
        if self._left == 0 and not self.is_raised:
            self.is_raised = True
            raise KeyboardInterrupt
        return self._ran


def lines_of(run: Callable[[], object], *, is_after: bool = False) -> int:
    """Interrupt `run` at each line in turn, check that the state is as before, and return how many lines there are."""
    run()  # what it imports is not traced
    for line in range(1, 1000):
        before, interrupt = thread_state(), Interrupt(line, is_after=is_after)
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


@pytest.mark.parametrize("is_after", [False, True], ids=["before it begins", "after it has ended"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_is_interrupted_leaves_nothing_behind(name: str, is_after: bool) -> None:
    make, fields = LAYERS[name]
    model = make()
    bound = Policy(compute="bfloat16", **fields).bind(model)
    with torch.no_grad(), castwise.autocast("cpu", policy=bound):
        assert lines_of(lambda: model(X), is_after=is_after) > (10 if is_after else 20)
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

    assert lines_of(run) > 30


def test_a_region_that_is_interrupted_while_its_policy_is_entered_is_not_entered() -> None:
    model = nn.Linear(32, 32)
    bound = Policy(compute="bfloat16", modules={"": "float32"}, ops={"softmax": "float32"}).bind(model)

    def run() -> None:
        with castwise.autocast("cpu", policy=bound):
            forward()

    def forward() -> None:
        """Its name ends the search for lines."""

    assert lines_of(run) > 10
    outer = Policy(compute="float16", ops={"gelu": "float32"}).bind(model)
    with castwise.autocast("cpu", policy=outer):
        lines_of(run)
        assert THREAD.state.bound is outer


@pytest.mark.parametrize("owner", [TorchFunctionMode, ruled_forward])
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


def test_without_torchs_list_of_modes_all_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_private, "_function_modes", list)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()
    bound = Policy(compute="bfloat16", modules={"1": "float32"}).bind(model)
    with castwise.autocast("cpu", policy=bound):
        for _ in range(3):
            model(torch.ones(1, 4))
    assert torch._C._len_torch_function_stack() == 0


def test_an_error_in_a_module_with_any_rule_puts_torchs_switches_back() -> None:
    class Disables(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            torch.set_autocast_enabled("cpu", False)
            raise ValueError("bad")

    model = Disables(4, 4)
    bound = Policy(compute="bfloat16", output="float32").bind(model)
    with castwise.autocast("cpu", policy=bound):
        with pytest.raises(ValueError, match="bad"):
            model(torch.ones(1, 4))
        assert torch.is_autocast_enabled("cpu")
