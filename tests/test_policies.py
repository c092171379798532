"""The ready policies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise import policies
from castwise._demo.gpt import GPT, Size

READY = {name: getattr(policies, name) for name in policies.__all__}


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "gpt": GPT(Size(layers=1, heads=2, width=16, context=8, batch=2)),
        "mlp": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
        "convolutions": nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)),
        "no parameters": nn.Sequential(nn.ReLU()),
    }


@pytest.mark.parametrize("name", READY)
def test_a_ready_policy_fits_any_model(name: str) -> None:
    for model in models().values():
        READY[name].bind(model)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("kind", ["mlp", "convolutions"])
def test_the_plain_ones_are_torch_autocast(name: str, dtype: torch.dtype, kind: str) -> None:
    given = torch.randn((2, 4) if kind == "mlp" else (2, 1, 4, 4))
    results = []
    for region in (None, torch.autocast("cpu", dtype=dtype)):
        model = models()[kind]
        with region or castwise.autocast("cpu", policy=READY[name].bind(model)):
            loss = nn.functional.cross_entropy(model(given), torch.tensor([0, 1]))
        loss.backward()
        results.append([loss, *(param.grad for param in model.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("name", "low"), [("bf16_stable", torch.bfloat16), ("fp16_stable", torch.float16)])
def test_the_stable_ones_run_in_fp32_what_needs_it(name: str, low: torch.dtype) -> None:
    model = models()["gpt"]
    seen: dict[str, torch.dtype] = {}

    def note(where: str) -> Any:
        return lambda module, args, out: seen.update({where: out.dtype})

    for where, module in model.named_modules():
        module.register_forward_hook(note(where))
    with castwise.autocast("cpu", policy=READY[name].bind(model)):
        logits = model(torch.randint(256, (2, 8)))
        half = logits.to(low)
        assert half.softmax(-1).dtype is torch.float32
        assert nn.functional.cross_entropy(half[:, 0], torch.tensor([1, 2])).dtype is torch.float32
        assert nn.functional.binary_cross_entropy(half.sigmoid(), torch.ones_like(half)).dtype is torch.float32
    assert seen["head"] is torch.float32
    assert {dtype for where, dtype in seen.items() if "norm" in where} == {torch.float32}
    assert {dtype for where, dtype in seen.items() if where.endswith(("qkv", "mlp.0"))} == {low}


def test_a_router_decides_in_fp32() -> None:
    model = nn.ModuleDict({"router": nn.Linear(4, 2), "expert": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
    with castwise.autocast("cpu", policy=policies.bf16_stable.bind(model)):
        dtypes = [module(torch.ones(1, 4)).dtype for module in model.values()]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32]
