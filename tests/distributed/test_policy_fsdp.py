"""Policies and FSDP2 in two real processes: one policy for both, or an error that says what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from castwise import Policy

POLICIES = ["one dtype", "norms and the last layer in fp32", "a block in fp32", "ops"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(Path(__file__).with_name("policy_worker.py"), 2, tmp_path_factory.mktemp("ranks") / "store", "")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sharded_model_trains_as_in_one_process(policy: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        result = rank["policies"][policy]
        one = result["one process"]
        assert result["sharded"]["losses"] == pytest.approx(one["losses"], rel=1e-2)
        for mine, other in zip(result["sharded"]["weights"], one["weights"], strict=True):
            assert mine == pytest.approx(other, rel=2e-2, abs=2e-2)
        assert one["losses"][-1] < one["losses"][0]
    assert ranks[0]["policies"][policy]["sharded"]["weights"] == ranks[1]["policies"][policy]["sharded"]["weights"]


@pytest.mark.parametrize("policy", POLICIES)
def test_modules_compute_in_the_dtype_they_are_gathered_in(policy: str, ranks: list[dict[str, Any]]) -> None:
    seen = ranks[0]["policies"][policy]["sharded"]["seen"]
    for name, outputs in ranks[0]["policies"][policy]["one process"]["seen"].items():
        gathered, _, computed = seen[name].partition(" to ")
        assert computed == outputs.partition(" to ")[2] or "1.norm" in name or "2.norm" in name
        if policy == "norms and the last layer in fp32":
            assert gathered == ("torch.bfloat16" if name.endswith(("up", "down")) else "torch.float32")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_weight_cache_leaves_what_fsdp_gathers_alone(policy: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        result = rank["policies"][policy]
        assert result["cached"]["weights"] == result["gathered in fp32"]["weights"]
        assert result["cached"]["report"]["cached"] == []
        reasons = result["cached"]["report"]["refused"]
        assert set(reasons.values()) - {"of a Linear with its own forward"} == {"of the subclass DTensor"}


def test_weights_that_are_gathered_in_another_dtype_are_refused(ranks: list[dict[str, Any]]) -> None:
    fits, norm, half = ranks[0]["errors"]
    assert fits == ""
    assert norm == (
        "the policy runs '1.norm' in float32, but FSDP gathers the weights of '1' in torch.bfloat16: "
        "shard with the policies that Policy.fsdp(...) yields, or give the module a rule"
    )
    assert half.startswith("the policy runs '1.norm' in bfloat16, but FSDP gathers the weights of '1' in")


def test_units_come_inner_ones_first_with_the_dtype_that_all_of_their_weights_are_used_in() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2)), nn.ReLU())
    policy = Policy(compute="bfloat16", modules={nn.LayerNorm: "float32"}, output="float32")

    def units(*keys: Any, **options: Any) -> list[tuple[nn.Module, Any, Any]]:
        return [
            (unit, mixed.param_dtype, mixed.output_dtype)
            for unit, mixed in policy.fsdp(model, keys, **options)
            if isinstance(mixed, MixedPrecisionPolicy) and mixed.reduce_dtype is torch.float32
        ]

    assert units() == [(model, None, torch.float32)]
    assert units("1") == [(model[1], None, None), (model, torch.bfloat16, torch.float32)]
    assert units("1.0", "1") == [
        (model[1][0], None, None),
        (model[1], torch.bfloat16, None),
        (model, torch.bfloat16, torch.float32),
    ]
    assert not any(mixed.cast_forward_inputs for _, mixed in policy.fsdp(model, ["1"]))
    with pytest.raises(ValueError, match="matches no module"):
        policy.fsdp(model, ["9"])
    with pytest.raises(TypeError, match="reduce_dtype must be"):
        policy.fsdp(model, ["1"], reduce_dtype="float32")  # type: ignore[arg-type]
