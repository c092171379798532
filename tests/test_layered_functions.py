"""Functions of torch that are replaced in several places are torch's again, in whatever order these end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import castwise
from castwise._layered_functions import LayeredFunction

NAMES = ("clip_grad_norm_", "clip_grad_value_")


def functions() -> list[Any]:
    clipping = [getattr(module, name) for module in (torch.nn.utils, torch.nn.utils.clip_grad) for name in NAMES]
    return [*clipping, torch.autograd.backward]


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[dict[str, Any]]:
    model = torch.nn.Linear(2, 1)
    monitor = castwise.Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), on_nonfinite="diagnose")
    yield {
        "install": (lambda: castwise.install(tmp_path, on_nonfinite="diagnose"), castwise.uninstall),
        "monitor": (monitor.attach, monitor.detach),
    }
    monitor.detach()
    castwise.uninstall()


def test_after_a_run_without_a_scaler_clipping_is_torchs_again(tmp_path: Path) -> None:
    before = functions()
    model = torch.nn.Linear(2, 1)
    with castwise.installed(tmp_path, on_nonfinite="diagnose"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert functions() == before


@pytest.mark.filterwarnings("ignore:not replaced by castwise")
@pytest.mark.parametrize("begins", [*itertools.permutations(["install", "monitor"])])
@pytest.mark.parametrize("ends", [["install", "monitor"], ["monitor", "install"]])
def test_what_was_replaced_is_back_in_whatever_order_it_ends(
    begins: tuple[str, ...], ends: list[str], begun: dict[str, Any]
) -> None:
    before = functions()
    for name in begins:
        begun[name][0]()
    assert all(now is not then for now, then in zip(functions(), before, strict=True))
    for name in ends:
        begun[name][1]()
    assert functions() == before


def test_layers_are_called_from_the_outermost_in_and_any_may_go() -> None:
    calls: list[str] = []

    def layer(name: str) -> Any:
        def observed(function: Any, *args: Any) -> Any:
            calls.append(name)
            return function(*args)

        return observed

    function = LayeredFunction("clip_grad_norm_", torch.nn.utils, torch.nn.utils.clip_grad)
    torchs, (inner, outer) = torch.nn.utils.clip_grad_norm_, map(layer, ("inner", "outer"))
    function.add(inner)
    function.add(outer)
    torch.nn.utils.clip_grad_norm_([], 1.0)
    function.remove(inner)
    torch.nn.utils.clip_grad_norm_([], 1.0)
    assert calls == ["outer", "inner", "outer"]
    function.remove(outer)
    assert torch.nn.utils.clip_grad_norm_ is torchs is torch.nn.utils.clip_grad.clip_grad_norm_


def test_what_a_script_has_put_in_its_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    function = LayeredFunction("clip_grad_norm_", torch.nn.utils)
    function.add(lambda clip, *args: clip(*args))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", own := lambda *args: function.function(*args))
    function.remove(function._layers[0])
    assert torch.nn.utils.clip_grad_norm_ is own
    own([], 1.0)  # of a function without layers
    monkeypatch.undo()
    torch.nn.utils.clip_grad_norm_ = function.original
