"""A region's nodes in a graph, as Dynamo runs them while it traces; `test_autocast_compile.py` has the graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from castwise import _torch_private
from castwise.amp import _traced_region

REGION = "cpu", True, torch.float16, False


def state() -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


@pytest.fixture(autouse=True)
def _state_is_put_back() -> Iterator[None]:
    before = state()
    yield
    torch.set_autocast_enabled("cpu", before[0])
    torch.set_autocast_dtype("cpu", before[1])
    torch.set_autocast_cache_enabled(before[2])


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a tracer receives that is a torch function mode, as `torch.export`'s."""
    seen: list[Any] = []
    for name in ("record_enter_autocast", "record_exit_autocast"):
        monkeypatch.setattr(_torch_private, name, lambda of, name=name: seen.append((name, of)))
    monkeypatch.setattr(_torch_private, "is_torch_function_mode_enabled", lambda: True)
    return seen


@pytest.mark.parametrize("call", [_traced_region.enter, _traced_region.leave])
@pytest.mark.parametrize("given", [("cpu", True, torch.float16, False), ("cpu", False, torch.bfloat16, True)])
def test_a_node_sets_all_of_the_state(call: Callable[..., None], given: tuple[Any, ...]) -> None:
    call(*given)
    assert state() == given[1:]


def test_a_tracer_is_reported_of_both_ends(recorded: list[Any]) -> None:
    _traced_region.enter(*REGION)
    assert recorded.pop() == ("record_enter_autocast", ("cpu", torch.float16, True, False))
    _traced_region.leave("cpu", False, torch.bfloat16, True)
    assert recorded == [("record_exit_autocast", ())]


def test_without_a_tracer_nothing_is_reported(recorded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_private, "is_torch_function_mode_enabled", lambda: False)
    _traced_region.enter(*REGION)
    _traced_region.leave("cpu", False, torch.bfloat16, True)
    assert recorded == []


@pytest.mark.parametrize("levels", [0, 1])
@pytest.mark.parametrize("options", [(), (True,), (False,)])
def test_casts_are_forgotten_at_the_outermost_end(
    monkeypatch: pytest.MonkeyPatch, levels: int, options: tuple[bool, ...]
) -> None:
    forgotten: list[None] = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: forgotten.append(None))
    for _ in range(levels):
        torch.autocast_increment_nesting()
    _traced_region.leave("cpu", False, torch.bfloat16, True, *options)
    assert torch.autocast_increment_nesting() == levels + 1
    for _ in range(levels + 1):
        torch.autocast_decrement_nesting()
    assert len(forgotten) == (levels == 0 and options != (False,))


def test_what_to_put_back_is_the_state_before_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[Callable[[], None]] = []
    allowed: list[Any] = []
    monkeypatch.setattr(_torch_private, "after_tracing", stopped.append)
    monkeypatch.setattr(torch.compiler, "allow_in_graph", allowed.append)
    _traced_region.prepare("cpu")
    assert allowed == [_traced_region.enter, _traced_region.leave]
    assert torch.fx.node._side_effectful_functions.issuperset(allowed)
    before = state()
    _traced_region.enter("cpu", not before[0], torch.float16, not before[2])
    stopped[0]()
    assert state() == before
