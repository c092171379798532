"""How long `MasterWeights` keeps a model alive, and what its copies know of theirs."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any
from weakref import ref

import pytest
import torch
from tests.master_weights.training import net, same_bits, train, wrapped
from torch import nn, optim

from castwise import MasterWeights, Policy


def without_up(**settings: Any) -> tuple[Any, MasterWeights]:
    """Return a network, and an optimizer of all its parameters but two."""
    model: Any = net()
    narrow = settings.pop("narrow", None)
    if isinstance(narrow, Policy):
        narrow = narrow.bind(model)
    params = [param for name, param in model.named_parameters() if "up" not in name]
    return model, MasterWeights(optim.AdamW(params, lr=1e-2), model, narrow=narrow, **settings)


COPIES: dict[str, Any] = {
    "copied": copy.deepcopy,
    "pickled": lambda pair: pickle.loads(pickle.dumps(pair)),
    "copied, optimizer first": lambda pair: tuple(reversed(copy.deepcopy(tuple(reversed(pair))))),
}


@pytest.mark.parametrize("method", ["split", "stochastic"])
def test_weights_die_with_their_last_reference(method: str) -> None:
    plain = net()
    train(plain, optim.AdamW(plain.parameters()), 1)  # torch's first optimizer of a process leaves cycles of its own
    gc.collect()
    gc.disable()
    try:
        model, optimizer = wrapped(lambda params: optim.AdamW(params, lr=1e-2), method=method)
        train(model, optimizer, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.clip_grad_norm_(1.0)
        optimizer.fp32_state_dict(model)
        params = [ref(param) for param in model.parameters()]
        state = [ref(value) for of_param in optimizer.state.values() for value in of_param.values()]
        del model, optimizer
        assert [param() for param in params] == [None] * len(params)
        assert [value() for value in state] == [None] * len(state)
    finally:
        gc.enable()


@pytest.mark.parametrize("how", COPIES)
def test_copies_add_groups_to_their_own_model(how: str) -> None:
    model, optimizer = without_up()
    train(model, optimizer, 2)
    model.zero_grad()
    twin, its_optimizer = COPIES[how]((model, optimizer))
    wrapper = nn.ModuleDict({"inner": twin})
    for its_model, each in ((model, optimizer), (twin, its_optimizer)):
        each.add_param_group({"params": its_model.up.parameters(), "lr": 1e-3})
        assert its_model.up.weight.dtype is torch.bfloat16
    assert train(twin, its_optimizer, 3) == train(model, optimizer, 3)
    assert same_bits(its_optimizer.fp32_state_dict(twin), optimizer.fp32_state_dict(model))
    del wrapper


def test_copies_keep_the_rules_for_new_groups() -> None:
    model, optimizer = without_up(narrow="all")
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    twin.extra = nn.LayerNorm(4)
    its_optimizer.add_param_group({"params": twin.extra.parameters()})
    assert twin.extra.weight.dtype is torch.bfloat16
    rule = Policy(compute="bfloat16", modules={"up": "float32"})
    model, optimizer = without_up(narrow=rule)
    params = copy.deepcopy((model, optimizer))[1].param_groups[0]["params"]
    assert {param.dtype for param in params} == {torch.float32, torch.bfloat16}
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    its_optimizer.add_param_group({"params": twin.up.parameters()})
    assert twin.up.weight.dtype is torch.float32


def test_a_copy_without_its_model_says_so() -> None:
    _, optimizer = without_up()
    alone = copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match=r"^the model no longer exists, so parameters cannot be added"):
        alone.add_param_group({"params": [torch.ones(1, requires_grad=True)]})


@pytest.mark.parametrize("state_dtype", [None, {"exp_avg": torch.bfloat16}])
def test_a_model_without_values_is_refused_at_once(state_dtype: Any) -> None:
    with torch.device("meta"):
        model = net()
    with pytest.raises(ValueError, match=r"^'token.weight' is on the meta device and has no values: call model.to_emp"):
        MasterWeights(optim.AdamW(model.parameters()), model, state_dtype=state_dtype)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
