"""The protocol between a scaler and an optimizer that computes its step in fp32."""

from __future__ import annotations

import torch

from castwise import MasterWeights
from castwise.amp._fp32_steps import StepsInFP32, steps_in_fp32


def test_master_weights_follow_the_protocol_and_no_optimizer_of_torch_does() -> None:
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters())
    assert not steps_in_fp32(inner)
    optimizer = MasterWeights(inner, model)
    assert steps_in_fp32(optimizer)
    assert steps_in_fp32(MasterWeights)
    only_in_step = {"grad_factor"}
    methods = {name for name, value in vars(StepsInFP32).items() if callable(value) and not name.startswith("__")}
    names = {*StepsInFP32.__annotations__, *methods} - only_in_step - {"_abc_impl", "_is_protocol", "_proto_hook"}
    assert {"clip_grad_norm_", "clip_grad_value_", "_clip_once_unscaled"} <= names
    assert all(hasattr(optimizer, name) for name in names)
