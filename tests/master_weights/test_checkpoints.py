"""Save and load `MasterWeights`: a run that stopped goes on with the bits of one that did not."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.master_weights.training import same_bits, train, wrapped
from torch import optim

from castwise import MasterWeights

LOW = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float16},
    {"method": "stochastic", "state_dtype": LOW, "generator": torch.Generator().manual_seed(9)},
    {"state_dtype": LOW},
    {"state_dtype": {"exp_avg": "int8_blockwise", "exp_avg_sq": "int8_blockwise"}},
    {"narrow": "all"},
]


def adamw(params: Any) -> optim.Optimizer:
    return optim.AdamW(params, lr=1e-2, fused=True)


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda settings: ", ".join(f"{k}={v}" for k, v in settings.items() if k != "generator")
)
@pytest.mark.parametrize("stop", [0, 1, 5])
def test_a_run_that_stops_goes_on_with_the_same_bits(settings: dict[str, Any], stop: int, order: str) -> None:
    dtype = settings.get("dtype", torch.bfloat16)
    model, optimizer = wrapped(adamw, **settings)
    schedule = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    train(model, optimizer, stop, dtype=dtype, after=schedule.step)
    saved = through_a_file([model.state_dict(), optimizer.state_dict(), schedule.state_dict()])
    expected = train(model, optimizer, 4, start=stop, dtype=dtype, after=schedule.step)

    again, loaded = wrapped(adamw, **{**settings, "generator": None})
    with torch.no_grad():
        again.up.weight.mul_(0.5)  # another start
    its_schedule = optim.lr_scheduler.StepLR(loaded, 2, 0.5)
    steps = [lambda: again.load_state_dict(saved[0]), lambda: loaded.load_state_dict(saved[1])]
    for step in steps if order == "model first" else reversed(steps):
        step()
    its_schedule.load_state_dict(saved[2])
    assert train(again, loaded, 4, start=stop, dtype=dtype, after=its_schedule.step) == expected
    assert same_bits(again.state_dict(), model.state_dict())
    assert same_bits(loaded.fp32_state_dict(again), optimizer.fp32_state_dict(model))


def test_state_is_fp32_whatever_the_parameters_are() -> None:
    """Which is where `torch.optim.Optimizer.load_state_dict` casts it to bfloat16."""
    model, optimizer = wrapped(adamw)
    train(model, optimizer, 3)
    saved = optimizer.state_dict()
    other, loaded = wrapped(adamw)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(saved)
    assert all(same_bits(loaded.state_dict()["state"][number], saved["state"][number]) for number in saved["state"])
    assert loaded.state[loaded.param_groups[0]["params"][1]]["exp_avg"].dtype is torch.float32
    inside = adamw(model.parameters())
    inside.load_state_dict(saved)
    assert inside.state[model.up.weight]["exp_avg"].dtype is torch.bfloat16


def test_groups_stay_the_same_objects() -> None:
    model, optimizer = wrapped(adamw)
    train(model, optimizer, 2)
    groups, first = optimizer.param_groups, optimizer.param_groups[0]
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is groups is optimizer.inner.param_groups
    assert groups[0] is first
    assert first["lr"] == 0.25
    assert first["params"] == list(model.parameters())
    optimizer.step()
    schedule.step()
    assert first["lr"] == pytest.approx(0.025)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_of_plain_optimizers_are_loaded(dtype: torch.dtype) -> None:
    plain, optimizer = wrapped(adamw)[0].to(dtype), None
    optimizer = adamw(plain.parameters())
    train(plain, optimizer, 3)
    model, loaded = wrapped(adamw)
    if dtype is torch.float32:
        loaded.load_fp32_state_dict(model, plain.state_dict())
    else:
        model.load_state_dict(plain.state_dict())
        with pytest.warns(UserWarning, match="weights were written since the last step"):
            loaded.fp32_state_dict(model)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert loaded.state[model.up.weight]["exp_avg"].dtype is torch.float32
    assert same_bits(loaded.fp32_state_dict(model), {k: v.float() for k, v in plain.state_dict().items()})
    if dtype is torch.float32:
        assert train(model, loaded, 3, start=3) == train(plain, optimizer, 3, start=3)


def test_fp32_checkpoints_are_ordinary_ones() -> None:
    model, optimizer = wrapped(adamw)
    train(model, optimizer, 3)
    saved = through_a_file(optimizer.fp32_state_dict(model))
    assert {value.dtype for value in saved.values()} == {torch.float32}
    other, loaded = wrapped(adamw)
    result = loaded.load_fp32_state_dict(other, saved)
    assert result.missing_keys == result.unexpected_keys == []
    assert same_bits(loaded.fp32_state_dict(other), saved)
    assert same_bits(other.state_dict(), model.state_dict())
    before = loaded.fp32_state_dict(other)
    saved["up.weight"] = saved["up.weight"][:1]
    with pytest.raises(ValueError, match=r"^'up.weight' has shape \(1, 32\) in the checkpoint, but the parameter has"):
        loaded.load_fp32_state_dict(other, saved)
    assert same_bits(loaded.fp32_state_dict(other), before)


def test_a_missing_weight_is_found_before_any_is_loaded() -> None:
    model, optimizer = wrapped(adamw)
    train(model, optimizer, 2)
    saved = optimizer.fp32_state_dict(model)
    other, loaded = wrapped(adamw)
    before = copy.deepcopy((other.state_dict(), loaded.fp32_state_dict(other)))
    fewer = {name: value for name, value in saved.items() if name != "down.weight"}
    with pytest.raises(RuntimeError, match=r"^'down.weight' is missing in the checkpoint: give strict=False"):
        loaded.load_fp32_state_dict(other, fewer)
    assert same_bits(other.state_dict(), before[0])
    assert same_bits(loaded.fp32_state_dict(other), before[1])
    assert loaded.load_fp32_state_dict(other, fewer, strict=False).missing_keys == ["down.weight"]
    assert same_bits(loaded.fp32_state_dict(other), {**saved, "down.weight": before[1]["down.weight"]})


def test_what_torch_has_loaded_before_it_raises_is_loaded_in_fp32() -> None:
    model, optimizer = wrapped(adamw)
    train(model, optimizer, 2)
    saved = optimizer.fp32_state_dict(model)
    other, loaded = wrapped(adamw)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        loaded.load_fp32_state_dict(other, {**saved, "unexpected": torch.ones(1)})
    assert same_bits(loaded.fp32_state_dict(other), saved)


def test_copies_and_pickles_go_on_alike() -> None:
    model, optimizer = wrapped(adamw)
    train(model, optimizer, 3)
    twins = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    expected = train(model, optimizer, 3, start=3)
    for twin, its_optimizer in twins:
        assert its_optimizer.param_groups is its_optimizer.inner.param_groups
        assert train(twin, its_optimizer, 3, start=3) == expected
        assert same_bits(its_optimizer.fp32_state_dict(twin), optimizer.fp32_state_dict(model))


def unchanged(optimizer: MasterWeights, model: Any, load: Any) -> None:
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    load()
    after = optimizer.state_dict()
    assert same_bits(model.state_dict(), before[0])
    assert after["param_groups"] == before[1]["param_groups"]
    assert after["state"].keys() == before[1]["state"].keys()
    assert all(same_bits(after["state"][number], before[1]["state"][number]) for number in after["state"])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": torch.float16}, r"has 'master_weights.half_residue' for .*: use the settings it was saved with"),
        ({"method": "stochastic"}, r"has no entries for 'conv.weight', .* needs 'master_weights.residue'"),
    ],
)
def test_checkpoints_of_other_methods_are_refused(settings: dict[str, Any], text: str) -> None:
    other, of_other = wrapped(adamw, **settings)
    train(other, of_other, 1, dtype=settings.get("dtype", torch.bfloat16))
    saved = of_other.state_dict()
    model, optimizer = wrapped(adamw)
    train(model, optimizer, 2)

    def load() -> None:
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(saved)

    unchanged(optimizer, model, load)


def test_checkpoints_that_do_not_fit_are_refused() -> None:
    model, optimizer = wrapped(adamw)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["master_weights.residue"] = torch.zeros(3, dtype=torch.int16)

    def load_another_shape() -> None:
        with pytest.raises(ValueError, match=r"^'master_weights.residue' of 'conv.weight' has shape \(3,\)"):
            optimizer.load_state_dict(saved)

    unchanged(optimizer, model, load_another_shape)
    fewer = copy.deepcopy(optimizer.state_dict())
    fewer["param_groups"][0]["params"].pop()

    def load_fewer() -> None:
        with pytest.raises(
            ValueError, match=r"^the checkpoint has groups of \[8\] parameters, but this optimizer has \[9\]"
        ):
            optimizer.load_state_dict(fewer)

    unchanged(optimizer, model, load_fewer)


def test_hooks_of_saving_and_loading_are_called_once() -> None:
    model, optimizer = wrapped(adamw)
    train(model, optimizer, 1)
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, saved: calls.append(f"saved {len(saved['state'])}"))
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: calls.append(f"loading {len(saved['state'])}"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["saving", "saved 9", "loading 9", "loaded"]
