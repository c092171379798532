"""The hooks that modules and optimizers have."""

from __future__ import annotations

import torch

from castwise._registered_hooks import hooks_of


def test_the_table_has_the_hooks_in_order_and_is_live() -> None:
    layer = torch.nn.Linear(1, 1)
    layer.register_forward_pre_hook(print)
    layer.register_forward_pre_hook(repr, prepend=True, with_kwargs=True)
    hooks = hooks_of(layer.register_forward_pre_hook)
    assert list(hooks.values()) == [repr, print]
    handle = layer.register_forward_pre_hook(len)
    assert list(hooks.values()) == [repr, print, len]
    handle.remove()
    assert list(hooks.values()) == [repr, print]


def test_nothing_is_left_behind() -> None:
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    calls: list[object] = []
    for owner, name in ((layer, "forward"), (layer, "forward_pre"), (optimizer, "step_pre"), (optimizer, "step_post")):
        before = repr(vars(owner))
        assert not hooks_of(getattr(owner, f"register_{name}_hook"))
        assert repr(vars(owner)) == before
    layer.register_forward_hook(lambda *_: calls.append("hook"))
    hooks_of(layer.register_forward_hook)
    layer(torch.ones(1))
    assert calls == ["hook"]
