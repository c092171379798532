"""Policies and the modules that torch runs by one fused op in inference: torch's bits, unless a rule changes something.

The fused op of an encoder casts less than autocast does module by module, so what it returns tells whether it ran.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise import Policy

BF16, FP32 = torch.bfloat16, torch.float32


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, x, x)[0]  # type: ignore[no-any-return]


MODELS = [Encoder, Layer, Attention]


def x() -> torch.Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def run(model: nn.Module, region: Any, mode: Any = torch.no_grad) -> torch.Tensor:
    with mode(), region:
        return model.eval()(x())  # type: ignore[no-any-return]


def plain() -> Any:
    return torch.autocast("cpu", dtype=BF16)


def are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


def one_by_one(make: Any) -> torch.Tensor:
    """Run the model without the fused op."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return run(make(), plain())
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


UNCHANGED: dict[str, dict[str, Any]] = {
    "a dtype": {},
    "another module": {"modules": {"head": "float32"}},
    "an output": {"output": "bfloat16"},
    "the dtype of the region": {"modules": {"type:*": "bfloat16", "head": "float32"}},
    "ops elsewhere": {"ops": {"cross_entropy": "float32", "softmax": "float32"}},
    "writes in place": {"in_place": "cast"},
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fields", UNCHANGED.values(), ids=UNCHANGED)
@pytest.mark.parametrize("make", MODELS)
def test_a_policy_that_changes_nothing_in_it_leaves_torchs_bits(make: Any, fields: dict[str, Any], mode: Any) -> None:
    expected = run(make(), plain(), mode)
    assert are_same(expected, one_by_one(make)) is (make is Attention), "which cannot be distinguished"
    model = make()
    bound = Policy("bfloat16", **fields).bind(model)
    assert are_same(run(model, castwise.autocast("cpu", policy=bound), mode), expected)
    assert are_same(run(model, plain(), mode), expected)
    assert are_same(run(model, castwise.autocast("cpu", policy=bound), mode), expected)


@pytest.mark.parametrize("make", MODELS)
def test_compiled_code_keeps_torchs_bits_too(make: Any) -> None:
    torch.compiler.reset()
    expected = run(torch.compile(make().eval(), backend="aot_eager", fullgraph=True), plain())
    for fields in UNCHANGED.values():
        torch.compiler.reset()
        model = make().eval()
        bound = Policy("bfloat16", **{**fields, "output": None}).bind(model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert are_same(run(compiled, castwise.autocast("cpu", policy=bound)), expected)


@pytest.mark.parametrize("make", MODELS)
def test_a_rule_for_it_as_a_whole_gives_the_bits_of_a_disabled_region(make: Any) -> None:
    model, twin = make(), make()
    bound = Policy("bfloat16", modules={"encoder": "float32"}).bind(model)
    got = run(model, castwise.autocast("cpu", policy=bound))
    assert are_same(got, run(twin, torch.autocast("cpu", enabled=False)))


CHANGED: dict[str, dict[str, Any]] = {
    "a module": {"modules": {"type:LayerNorm": "float32"}},
    "an op": {"ops": {"layer_norm": "float32"}},
}


@pytest.mark.parametrize("fields", CHANGED.values(), ids=CHANGED)
@pytest.mark.parametrize("make", [Encoder, Layer])
def test_a_rule_in_it_wins_and_ends_with_the_region(make: Any, fields: dict[str, Any]) -> None:
    model, seen = make(), []
    bound = Policy("bfloat16", **fields).bind(model)
    norm = next(module for module in model.modules() if isinstance(module, nn.LayerNorm))
    norm.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    got = run(model, castwise.autocast("cpu", policy=bound))
    assert seen == [FP32]
    norm._forward_hooks.clear()
    assert are_same(run(model, castwise.autocast("cpu", policy=bound)), got)
    assert are_same(got, one_by_one(make)), "a norm runs in fp32 anyway"
    torch.compiler.reset()
    compiled = torch.compile(model.eval(), backend="aot_eager", fullgraph=True)
    assert are_same(run(compiled, castwise.autocast("cpu", policy=bound)), got)
    assert are_same(run(model, plain()), run(make(), plain())), "no rule outside of the region"


def test_training_follows_the_rules() -> None:
    model = Layer().train()
    bound = Policy("bfloat16", modules={"encoder.norm1": "float32"}, ops={"softmax": "float32"}).bind(model)
    with castwise.autocast("cpu", policy=bound):
        model(x()).sum().backward()
    assert all(param.grad is not None for param in model.encoder.parameters())
