"""Which outputs of modules are counted: those of one forward of the training, by hooks that are there only for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from castwise.monitor._activations import Activations
from castwise.monitor._exponents import tally
from castwise.monitor._tally import Tally


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def numels(watch: Activations) -> dict[str, int]:
    return {name: sum(tally(one).numel for one in counts) for name, counts in watch.stop().items()}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def test_outputs_are_counted_by_module() -> None:
    model, x = mlp(), torch.randn(5, 4)
    watch = Activations(model)
    watch.watch()
    model(x)
    found = {name: tally(counts[0]) for name, counts in watch.stop().items()}
    hidden = model[0](x)
    assert list(found) == ["0", "1", "2", ""]
    assert found["1"].zero == (hidden <= 0).sum().item()
    assert found["1"].largest == hidden.max().item()
    assert found[""] == found["2"]
    in_fp32 = watch.dtypes
    watch.watch()
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    watch.stop()
    assert (in_fp32, watch.dtypes) == (dict.fromkeys(found, "float32"), dict.fromkeys(found, "bfloat16"))


def test_hooks_are_there_only_while_it_watches() -> None:
    model = mlp()
    watch = Activations(model)
    assert hooks_of(model) == 0
    watch.watch()
    assert hooks_of(model) == 2 * 4
    watch.stop()
    assert hooks_of(model) == 0
    model(torch.randn(5, 4))
    assert watch.stop() == {}


def test_of_several_micro_batches_the_first_counts() -> None:
    model = mlp()
    watch = Activations(model)
    watch.watch()
    model(torch.randn(5, 4)).sum().backward()
    model(torch.randn(50, 4)).sum().backward()
    assert numels(watch) == {"0": 30, "1": 30, "2": 10, "": 10}


def test_a_validation_does_not_count() -> None:
    model = mlp()
    watch = Activations(model)
    watch.watch()
    with torch.no_grad():
        model(torch.randn(50, 4))
    model(torch.randn(5, 4))
    assert numels(watch)[""] == 10


def test_all_calls_of_a_module_within_the_forward_count() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.unused = nn.Linear(4, 4), nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.linear(x))  # type: ignore[no-any-return]

    model = Twice()
    watch = Activations(model)
    watch.watch()
    for _ in range(2):
        model(torch.randn(5, 4))
    assert numels(watch) == {"linear": 40, "": 20}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_checkpointing_runs_again_does_not_count_twice(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    model = Checkpointed()
    watch = Activations(model)
    watch.watch()
    model(torch.randn(5, 4, requires_grad=True)).sum().backward()
    assert numels(watch) == {"inner.0": 30, "inner.1": 30, "inner.2": 10, "inner": 10, "": 10}


def test_a_model_whose_parts_are_called_one_by_one() -> None:
    parts = nn.ModuleDict({"generator": mlp(), "critic": nn.Linear(2, 1)})
    watch = Activations(parts)
    watch.watch()
    for _ in range(2):
        parts["critic"](parts["generator"](torch.randn(5, 4)))
    assert numels(watch) == {
        "generator.0": 30,
        "generator.1": 30,
        "generator.2": 10,
        "generator": 10,
        "critic": 5,
    }


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    model = mlp()
    watch = Activations(model)
    watch.watch()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.randn(5, 3))
    model(torch.randn(5, 4))
    assert numels(watch) == {"0": 30, "1": 30, "2": 10, "": 10}


@pytest.mark.parametrize(
    ("output", "numel"),
    [
        (lambda x: {"a": x, "b": [x, x.int()]}, 40),
        (lambda x: x.to(torch.float8_e4m3fn), 20),
        (lambda x: x.argmax(), 0),
        (lambda x: None, 0),
        (lambda x: x.to_sparse(), 20),
        (lambda x: x.to("meta"), 0),
    ],
    ids=["nested", "fp8", "integers", "nothing", "sparse", "meta"],
)
def test_whatever_a_module_returns(output: Callable[[torch.Tensor], Any], numel: int) -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return output(x)

    model = Module()
    watch = Activations(model)
    watch.watch()
    model(torch.ones(5, 4))
    assert numels(watch).get("", 0) == numel


def test_functorch_is_left_alone() -> None:
    model = mlp()
    watch = Activations(model)
    watch.watch()
    torch.vmap(model)(torch.randn(5, 4))
    assert watch.stop() == {}


def compiled_whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager", fullgraph=True)  # type: ignore[return-value]


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager", fullgraph=True)
    return model


def compiled_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)  # type: ignore[method-assign]
    return model


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("compiled", [compiled_whole, compiled_in_place, compiled_forward])
def test_compiled_modules_are_left_alone(compiled: Callable[[nn.Module], nn.Module]) -> None:
    torch.compiler.reset()
    model = nn.Sequential(compiled(Doubled()), nn.Linear(2, 1))
    watch = Activations(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for is_watched in (True, False, True, False):
            if is_watched:
                watch.watch()
            model(torch.randn(5, 4))
            assert numels(watch) == ({"1": 5, "": 5} if is_watched else {})


def test_what_is_compiled_behind_the_watchers_back_is_compiled_once() -> None:
    torch.compiler.reset()
    model = mlp()
    watch = Activations(model)
    forward = torch.compile(model, backend="eager", fullgraph=True)
    watch.watch()
    forward(torch.randn(5, 4))
    assert numels(watch) == {}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            forward(torch.randn(5, 4))
            watch.watch()
            forward(torch.randn(5, 4))
            assert numels(watch) == {}


def test_a_trace_of_torch_jit_has_no_ops_of_the_watcher() -> None:
    model, x = mlp(), torch.randn(5, 4)
    ops = [node.kind() for node in torch.jit.trace(model, x).inlined_graph.nodes()]
    watch = Activations(model)
    watch.watch()
    assert [node.kind() for node in torch.jit.trace(model, x).inlined_graph.nodes()] == ops
    assert numels(watch) == {}


def test_nothing_changes_what_a_forward_computes() -> None:
    model, x = mlp(), torch.randn(5, 4)
    expected = model(x)
    watch = Activations(model)
    watch.watch()
    assert model(x).equal(expected)
    assert sum((tally(one) for one in watch.stop()[""]), Tally()).numel == 10
