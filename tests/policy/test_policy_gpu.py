"""Policies on a GPU: those of the CPU's tests that depend on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise import Policy, WeightCache, policies

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).cuda()


def x() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).cuda()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_policy_without_rules_is_torch_to_the_bit(dtype: torch.dtype) -> None:
    results = []
    for ours in (True, False):
        model = net()
        policy = Policy(compute=dtype)  # type: ignore[arg-type]
        with castwise.autocast("cuda", policy=policy.bind(model)) if ours else torch.autocast("cuda", dtype=dtype):
            loss = model(x()).square().mean()
        loss.backward()
        results.append([loss, *(param.grad for param in model.parameters())])
    assert all(map(torch.equal, *results))


RULES: list[dict[str, Any]] = [
    {"modules": {"3": "float32"}, "output": "float16"},
    {"modules": {"0": "float16"}, "ops": {"layer_norm": "bfloat16", "gelu": "float32"}},
    {"modules": {"": "float32", "0": "bfloat16"}, "ops": {"softmax": "float16"}},
]


@pytest.mark.parametrize("fields", RULES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_rules_hold_in_eager_and_compiled_code(fields: dict[str, Any], backend: str) -> None:
    results = []
    for compiled in (True, False):
        torch._dynamo.reset()
        model = net()
        bound = Policy(compute="bfloat16", **fields).bind(model)
        run: Any = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
        with castwise.autocast("cuda", policy=bound):
            out = run(x())
        out.float().square().sum().backward()
        results.append([out, *(param.grad for param in model.parameters())])
    for mine, other in zip(*results, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)


def test_a_source_is_cast_and_a_weight_cache_serves_a_policy() -> None:
    model = net()
    cache = WeightCache(model)
    bound = policies.bf16_stable.bind(model)
    destination = torch.zeros(8, 4, device="cuda")
    with torch.no_grad():
        for _ in range(2):
            with castwise.autocast("cuda", policy=bound, weight_cache=cache):
                out = model(x())
        with castwise.autocast("cuda", policy=bound):
            assert torch.equal(model(x()), out)
        with castwise.autocast("cuda", policy=Policy(compute="bfloat16", in_place="cast").bind(model)):
            destination.index_copy_(0, torch.arange(8, device="cuda"), out.half())
    assert torch.equal(destination, out.half().float())
    assert cache.report().hits > 0
