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
    names = {*StepsInFP32.__annotations__, "clip_grad_norm_"} - only_in_step
    assert all(hasattr(optimizer, name) for name in names)
