"""Checkpoints that castwise 0.2 saved, also with methods that are gone: they load into `method="split"`.

`checkpoints_of_0_2.pt` was written by castwise 0.2.0: for each of its methods the model, the optimizer and
`fp32_state_dict` after a few steps of SGD. Its first three weights are ties.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.master_weights.training import same_bits
from torch import nn, optim

from castwise import MasterWeights

SAVED: dict[str, Any] = torch.load(Path(__file__).with_name("checkpoints_of_0_2.pt"), weights_only=True)
ENTRY = {
    "fp32": "master",
    "fp32, float16": "master",
    "kahan": "compensation",
    "kahan, float16": "compensation",
    "nearest_away": "residue",
}


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def dtype_of(name: str) -> torch.dtype:
    return torch.float16 if "float16" in name else torch.bfloat16


def fresh(name: str, **settings: Any) -> tuple[nn.Linear, MasterWeights]:
    torch.manual_seed(1)
    model = nn.Linear(5, 3)
    return model, MasterWeights(sgd(model), model, dtype=dtype_of(name), **settings)


def step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.arange(param.numel()).view_as(param).to(param.dtype) / 8  # exact in 16 bits
    optimizer.step()


ORDERS = [(name, "model first") for name in SAVED] + [
    (name, "optimizer first") for name in SAVED if "kahan" not in name
]


@pytest.mark.parametrize(("name", "order"), ORDERS)
def test_training_goes_on_from_the_fp32_weights_that_were_saved(name: str, order: str) -> None:
    saved = copy.deepcopy(SAVED[name])
    model, optimizer = fresh(name)
    loads = [lambda: model.load_state_dict(saved["model"]), lambda: optimizer.load_state_dict(saved["optimizer"])]
    for load in loads if order == "model first" else reversed(loads):
        load()
    assert same_bits(optimizer.fp32_state_dict(model), saved["fp32"])

    plain = nn.Linear(5, 3)
    plain.load_state_dict(saved["fp32"])
    expected = sgd(plain)
    momenta = {
        number: {"momentum_buffer": state["momentum_buffer"]} for number, state in saved["optimizer"]["state"].items()
    }
    expected.load_state_dict(copy.deepcopy({**saved["optimizer"], "state": momenta}))
    for _ in range(3):
        step(model, optimizer)
        step(plain, expected)
    assert same_bits(optimizer.fp32_state_dict(model), plain.state_dict())
    for param, its_plain in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, its_plain.to(param.dtype))


@pytest.mark.parametrize("name", ENTRY)
def test_what_is_saved_next_has_the_entries_of_split(name: str) -> None:
    model, optimizer = fresh(name)
    model.load_state_dict(SAVED[name]["model"])
    optimizer.load_state_dict(copy.deepcopy(SAVED[name]["optimizer"]))
    kept = ["half_residue"] if "float16" in name else ["residue", "ties"]
    for entries in optimizer.state_dict()["state"].values():
        ours = {entry for entry in entries if entry.startswith("master_weights.")}
        assert ours == {f"master_weights.{entry}" for entry in (*kept, "row_digests")}


@pytest.mark.parametrize("name", ENTRY)
def test_weights_in_another_memory_order_are_converted(name: str) -> None:
    model = nn.Linear(5, 3)
    model.weight = nn.Parameter(torch.zeros(5, 3).t())
    optimizer = MasterWeights(sgd(model), model, dtype=dtype_of(name))
    assert model.weight.stride() == (1, 3)
    model.load_state_dict(SAVED[name]["model"])
    optimizer.load_state_dict(copy.deepcopy(SAVED[name]["optimizer"]))
    assert same_bits(optimizer.fp32_state_dict(model), SAVED[name]["fp32"])


def refused(text: str, name: str, saved: dict[str, Any], **settings: Any) -> None:
    model, optimizer = fresh(name, **settings)
    step(model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(saved)
    assert same_bits(model.state_dict(), before[0])
    after = optimizer.state_dict()
    assert after["param_groups"] == before[1]["param_groups"]
    assert all(same_bits(after["state"][number], before[1]["state"][number]) for number in before[1]["state"])


@pytest.mark.parametrize("name", ["kahan", "kahan, float16"])
def test_a_compensation_needs_the_weights_it_was_saved_with(name: str) -> None:
    text = r"^'master_weights.compensation' of 'weight' does not belong to the 16-bit weight: load the model first"
    refused(text, name, copy.deepcopy(SAVED[name]["optimizer"]))


@pytest.mark.parametrize("name", ENTRY)
def test_other_methods_do_not_convert(name: str) -> None:
    text = rf"^the checkpoint has 'master_weights.{ENTRY[name]}' for 'weight', but method='stochastic' .* needs none"
    refused(text, name, copy.deepcopy(SAVED[name]["optimizer"]), method="stochastic")


@pytest.mark.parametrize("name", ENTRY)
def test_a_checkpoint_of_two_methods_is_damaged(name: str) -> None:
    saved = copy.deepcopy(SAVED[name]["optimizer"])
    saved["state"][1] = copy.deepcopy(SAVED["split"]["optimizer"]["state"][1])
    refused(r"^the checkpoint has .* for '(weight|bias)', but method='split' with torch.\w+ needs ", name, saved)
    saved = copy.deepcopy(SAVED[name]["optimizer"])
    saved["state"][0][f"master_weights.{ENTRY[name]}"] = torch.zeros(2, dtype=torch.int8)
    refused(rf"^'master_weights.{ENTRY[name]}' of 'weight' is torch.int8 in the checkpoint, not ", name, saved)
    saved["state"] = {0: {"master_weights.crumbs": torch.zeros(3, 5)}}
    refused(r"^the checkpoint has 'master_weights.crumbs' for 'weight', but method='split' with ", name, saved)


def test_weights_beyond_float16_are_refused() -> None:
    saved = copy.deepcopy(SAVED["fp32, float16"]["optimizer"])
    saved["state"][0]["master_weights.master"][0, 0] = 65520.0
    refused(r"^'master_weights.master' of 'weight' has a weight beyond 65504", "fp32, float16", saved)
