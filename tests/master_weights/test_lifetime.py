"""How long `MasterWeights` keeps a model alive, and what its copies know of theirs."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
from tests.master_weights.training import train, wrapped
from torch import optim


@pytest.mark.parametrize("method", ["split", "stochastic"])
def test_weights_die_with_their_last_reference(method: str) -> None:
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
