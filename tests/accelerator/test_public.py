"""What is public and has no other test on an accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator.availability import DEVICE, IS_SIMULATED, simulated
from tests.accelerator.training import Counted, Training, batches, bits, net
from torch import nn

import castwise
from castwise import MasterWeights, checking


def trains(eps: float = 1e-5, loss_of: Any = torch.square) -> Any:
    def train() -> None:
        model = net().to(DEVICE)
        model[1].eps = eps
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
        for batch in batches(3):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.float16):
                loss = loss_of(model(batch)).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return train


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_check_knows_a_function_again_and_names_what_was_changed() -> None:
    golden = checking.record(trains(), 2)
    assert checking.check(trains(), golden).kind == "identical" or not IS_SIMULATED
    found = checking.check(trains(eps=0.1), golden)
    assert (found.kind, found.where) == ("different", "1, forward")
    assert "abs" in str(checking.compare_ops(trains(), trains(loss_of=torch.abs)))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": 8 * self.head(self.embed(tokens))}


def test_log_probs_of_an_engine_are_compared_as_on_a_cpu() -> None:
    record = {"tokens": [3, 1, 4, 1, 5], "log_probs": [None, -2.0, -3.0, -2.5, -1.0]}
    found = []
    for device in (DEVICE, "cpu"):
        torch.manual_seed(0)
        drift = castwise.compare_log_probs(Language().to(device).eval(), [record], engine=castwise.policies.bf16)
        found.append(drift.summary)
    assert found[0].tokens == 4
    assert found[0].mean_difference == pytest.approx(found[1].mean_difference, rel=1e-5)


@pytest.mark.parametrize("cast_inputs", [None, torch.float32])
def test_custom_functions_have_the_bits_of_torchs(cast_inputs: torch.dtype | None) -> None:
    results = []
    for library in (torch.amp, castwise):

        class Product(torch.autograd.Function):
            @staticmethod
            @library.custom_fwd(device_type=DEVICE, cast_inputs=cast_inputs)
            def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x, y)
                return x @ y

            @staticmethod
            @library.custom_bwd(device_type=DEVICE)
            def backward(ctx: Any, grad: torch.Tensor) -> Any:
                x, y = ctx.saved_tensors
                return grad @ y.t(), x.t() @ grad

        torch.manual_seed(0)
        x, y = (torch.randn(8, 8).to(DEVICE).requires_grad_() for _ in range(2))
        with library.autocast(DEVICE, dtype=torch.float16):
            product = Product.apply(x, y)
        product.float().square().sum().backward()
        assert product.dtype is (cast_inputs or torch.float16)
        results.append(bits([product, x.grad, y.grad]))
    assert results[0] == results[1]


def test_torchs_names_are_castwises_while_installed_and_the_run_has_a_verdict(tmp_path: Path) -> None:
    assert castwise.is_autocast_available(DEVICE)
    before = torch.amp.GradScaler
    expected = Training(torch.amp, "foreach").run(batches(4, spoilt=(2,)))
    with castwise.installed(tmp_path, every=1):
        assert torch.amp.GradScaler is castwise.GradScaler
        assert Training(torch.amp, "foreach").run(batches(4, spoilt=(2,))) == expected
    assert torch.amp.GradScaler is before
    assert "The loss was inf or NaN at 1 step, first at step 3" in str(castwise.verdict(tmp_path))


@simulated
def test_micro_batches_that_are_compensated_have_the_bits_of_a_cpu() -> None:
    results = []
    for device in (DEVICE, "cpu"):
        model = net().to(device)
        optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), fused=True), model, accumulate="compensated")
        draw = torch.Generator().manual_seed(0)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(4):
                loss = [
                    (param * torch.randn(param.shape, generator=draw).to(param)).sum() for param in model.parameters()
                ]
                torch.stack([each.float() for each in loss]).sum().backward()
            with Counted() as counted:
                optimizer.step()
        assert counted.waits == {}, counted.lines
        results.append(bits(optimizer.fp32_state_dict(model).values()))
    assert results[0] == results[1]


def test_weights_are_loaded_and_narrowed_where_they_are() -> None:
    model, other = net().to(DEVICE), net().to(DEVICE)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(1.1)
    optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), fused=True), model)
    optimizer.load_fp32_state_dict(model, other.state_dict())
    assert bits(optimizer.fp32_state_dict(model).values()) == bits(other.state_dict().values())
    assert "the same bits" in str(optimizer.narrowing_report(model, batches(1)[0]))
    MasterWeights.narrow_(other)
    assert [param.dtype for param in other.parameters()] == [param.dtype for param in model.parameters()]
