"""`ModuleOfOp`: which module an op belongs to, in the forward, in the backward and in one that runs within another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from castwise.tracing import _module_of_op as module_of_op
from castwise.tracing._module_of_op import ModuleOfOp


class Scaled(nn.Module):
    """Computes something itself before and after its children."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.a, self.b, self.reentrant = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        y = self.a(x) if self.reentrant is None else checkpoint(self.a, x, use_reentrant=self.reentrant)
        return self.b(y).cos()  # type: ignore[no-any-return]


class Names(TorchDispatchMode):
    def __init__(self, names: ModuleOfOp) -> None:
        super().__init__()
        self._names, self.seen = names, list[tuple[str, str | None]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in {torch.ops.aten.mm, torch.ops.aten.sin, torch.ops.aten.cos, torch.ops.aten.exp}:
            self.seen.append((str(func.overloadpacket).removeprefix("aten."), self._names.name()))
        return func(*args, **(kwargs or {}))


def x() -> torch.Tensor:
    return torch.ones(3, 4, requires_grad=True)


def test_ops_belong_to_the_innermost_module_and_their_gradients_too() -> None:
    model = Scaled()
    with ModuleOfOp(model) as names, Names(names) as ops:
        given = x().exp()
        out = model(given).exp().sum()
        assert ops.seen == [("exp", None), ("sin", ""), ("mm", "a"), ("mm", "b"), ("cos", ""), ("exp", None)]
        ops.seen.clear()
        names.begin_backward()
        out.backward()
    assert ops.seen == [("sin", ""), ("mm", "b"), ("mm", "b"), ("mm", "a"), ("mm", "a"), ("cos", "")]


def test_what_ran_before_every_module_belongs_to_none() -> None:
    model, named = Scaled(), []
    before = x().exp()
    before.register_hook(lambda _: named.append(names.name()))
    with ModuleOfOp(model) as names:
        assert names.name() is None
        before.sum().backward(retain_graph=True)
        names.begin_backward()
        model(before).sum().backward()
    assert named == [None, None]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_that_is_run_again_has_the_names_of_the_first(reentrant: bool) -> None:
    model = Scaled(reentrant)
    with ModuleOfOp(model) as names, Names(names) as ops:
        for _ in range(2):
            out = model(x())
            ops.seen.clear()
            names.begin_backward()
            out.sum().backward()
            again = [("mm", "a")] if reentrant else []  # this one stops as soon as it has what was saved
            gradients = [("sin", ""), ("mm", "b"), ("mm", "b"), *again, ("mm", "a"), ("mm", "a"), ("cos", "")]
            assert ops.seen == gradients


def test_where_a_gradient_arrives_it_is_the_module_that_has_the_parameter() -> None:
    model, arrived = Scaled(), []
    given = x()
    for tensor in (given, model.a.weight, model.b.weight):
        tensor.register_hook(lambda _: arrived.append(names.name()))
    with ModuleOfOp(model) as names:
        out = model(given)
        names.begin_backward()
        out.sum().backward()
    assert arrived == ["b", "a", None]


def test_nothing_is_followed_any_more_afterwards() -> None:
    model = Scaled()
    with ModuleOfOp(model) as names:
        assert not names.is_forward_running()
        model.a.register_forward_hook(lambda *_: running.append(names.is_forward_running()))
        running: list[bool] = []
        model(x())
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 5))
        assert not names.is_forward_running()
    model(x())
    assert running == [True, False]
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.fixture
def autograd(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Says what autograd would on a machine where each thread numbers the nodes that it makes."""
    says = SimpleNamespace(made=0, node=None, backward=None)
    monkeypatch.setattr(module_of_op, "graph_nodes_made", lambda: says.made)
    monkeypatch.setattr(module_of_op, "graph_node_running", lambda: says.node)
    monkeypatch.setattr(module_of_op, "backward_running", lambda: says.backward)
    monkeypatch.setattr(module_of_op, "leaf_running", lambda: None)
    return says


def test_a_graph_that_another_thread_has_made_has_numbers_of_its_own(autograd: SimpleNamespace) -> None:
    names = ModuleOfOp(Scaled())

    def run(module: str, first: int, stop: int) -> None:
        autograd.made = first
        names._enter(module)
        autograd.made = stop
        names._leave()

    def name(backward: int, node: int) -> str | None:
        autograd.backward, autograd.node = backward, node
        return names.name()

    run("a", 10, 20)
    run("b", 20, 30)
    names.begin_backward()
    assert [name(1, node) for node in (9, 10, 19, 20, 29, 30)] == [None, "a", "a", "b", "b", None]
    run("a", 0, 5)
    assert [name(2, node) for node in (0, 4, 5)] == ["a", "a", None]
    assert name(1, 4) is None
    assert name(1, 12) == "a"
