"""Names of a model's parts do not depend on what wraps it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from castwise.monitor import _module_names as names


def model() -> nn.Module:
    block = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    return nn.Sequential(block, nn.ModuleDict({"module": nn.Linear(3, 2, bias=False)}))


def test_the_parts_of_a_plain_model() -> None:
    assert list(names.modules(model())) == ["", "0", "0.0", "0.1", "1", "1.module"]
    assert list(names.parameters(model())) == ["0.0.weight", "0.0.bias", "1.module.weight"]


def test_wrappers_leave_no_trace() -> None:
    plain = model()
    inside = model()
    inside[0] = checkpoint_wrapper(inside[0])
    for wrapped in (nn.DataParallel(plain), torch.compile(plain), nn.DataParallel(torch.compile(plain)), inside):
        assert list(names.modules(wrapped)) == list(names.modules(plain))
        assert list(names.parameters(wrapped)) == list(names.parameters(plain))
    assert names.modules(torch.compile(plain))[""] is plain


def test_what_is_shared_is_there_once_by_its_first_name() -> None:
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    assert list(names.parameters(tied)) == ["0.weight"]
    relu = nn.ReLU()
    assert list(names.modules(nn.Sequential(relu, nn.Linear(2, 2), relu))) == ["", "0", "1"]
