"""`MasterWeights` on an accelerator: the bits of fp32 weights and of a CPU, without waits and in few launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.accelerator.availability import DEVICE, simulated
from tests.accelerator.training import Counted, batches, bits, net
from torch import nn

import castwise
from castwise import MasterWeights

OPTIONS: dict[str, dict[str, Any]] = {
    "split": {},
    "split fp16": {"dtype": torch.float16},
    "stochastic": {"method": "stochastic"},
    "state": {"state_dtype": {"exp_avg": (torch.bfloat16, "nearest"), "exp_avg_sq": torch.bfloat16}},
}
if hasattr(torch.Tensor, "grad_dtype"):  # torch 2.13
    OPTIONS["fp32 gradients"] = {"grad_dtype": torch.float32}
INNER: dict[str, Any] = {
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "loop": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
}


class Training:
    """A model with 16-bit weights, or with fp32 ones if `options` is None."""

    def __init__(
        self, inner: str, options: dict[str, Any] | None, device: str = DEVICE, *, scaled: bool = False
    ) -> None:
        self.model = net().to(device)
        self.optimizer: Any = INNER[inner](self.model.parameters())
        if options is not None:
            self.optimizer = MasterWeights(self.optimizer, self.model, **options)
        dtype = (options or {}).get("dtype", torch.bfloat16)
        self.region: dict[str, Any] = {"device_type": torch.device(device).type, "dtype": dtype}
        self.scaler = castwise.GradScaler(torch.device(device).type, init_scale=2.0**7, enabled=scaled)

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        with castwise.autocast(**self.region):
            loss = self.model(batch).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.clip_grad_norm_(self.optimizer, 0.05)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def fp32(self) -> list[list[float]]:
        state = self.model.state_dict()
        if isinstance(self.optimizer, MasterWeights):
            state = self.optimizer.fp32_state_dict(self.model)
        return bits(state.values())


def counted_step(training: Training) -> Counted:
    *first, last = batches(4)
    for batch in first:
        training.step(batch)
    with Counted() as counted:
        training.step(last)
    return counted


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("inner", INNER)
def test_16_bit_weights_train_as_fp32_weights_do(inner: str, scaled: bool) -> None:
    low, fp32 = Training(inner, {}, scaled=scaled), Training(inner, None, scaled=scaled)
    for batch in batches(6, spoilt=(3,) if scaled else ()):
        low.step(batch)
        fp32.step(batch)
    assert low.fp32() == fp32.fp32()


@simulated
@pytest.mark.parametrize("options", OPTIONS)
def test_the_bits_are_those_of_a_cpu(options: str) -> None:
    results = []
    for device in (DEVICE, "cpu"):
        training = Training("foreach", OPTIONS[options], device)
        for param, grads in zip(training.model.parameters(), range(100), strict=False):
            draw = torch.Generator().manual_seed(grads)
            param.grad = torch.randn(param.shape, generator=draw).to(
                device, OPTIONS[options].get("grad_dtype", param.dtype)
            )
        for _ in range(3):
            training.optimizer.step()
        results.append(training.fp32())
    assert results[0] == results[1]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_fused_step_never_waits(options: str, scaled: bool) -> None:
    counted = counted_step(Training("fused", OPTIONS[options], scaled=scaled))
    assert counted.waits == {}, counted.lines


def test_a_skipped_step_uses_up_no_random_bits() -> None:
    weights = []
    for skips in (False, True):
        training = Training("fused", OPTIONS["stochastic"], scaled=True)
        for batch in batches(3, spoilt=(1,)):
            if skips or batch.isfinite().all():
                training.step(batch)
        weights.append(training.fp32())
    assert weights[0] == weights[1]


def test_a_checkpoint_continues_the_run() -> None:
    data = batches(8)
    for options in OPTIONS.values():
        through, first, second = (Training("fused", options) for _ in range(3))
        for batch in data:
            through.step(batch)
        for batch in data[:4]:
            first.step(batch)
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        for batch in data[4:]:
            second.step(batch)
        assert second.fp32() == through.fp32()


def test_a_write_from_outside_is_used() -> None:
    training = Training("fused", {})
    training.step(batches(1)[0])
    weight = training.model[0].weight
    with torch.no_grad():
        weight.fill_(1.0)
    weight.grad = torch.zeros_like(weight)
    with pytest.warns(UserWarning, match="written"):
        training.optimizer.step()
    torch.testing.assert_close(weight.float().cpu(), torch.ones(weight.shape), rtol=0.0, atol=0.02)


@simulated
@pytest.mark.parametrize("scaled", [False, True])
def test_a_compiled_step_of_gpt2_launches_few_kernels_and_takes_at_most_twice_the_time_of_fp32(
    scaled: bool,
) -> None:
    from tests.accelerator.counts import of_gpt2

    fp32, ours = of_gpt2(None, scaled=scaled), of_gpt2({}, scaled=scaled)
    assert ours.counts.launches - fp32.counts.launches <= (70 if scaled else 60)
    assert ours.counts.waits == {}
    assert ours.ms <= 2.0 * fp32.ms
    assert ours.workspace <= 1.25


@simulated
@pytest.mark.parametrize("options", OPTIONS)
def test_compiled_codecs_have_the_bits_of_torchs_ops(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.accelerator.kernels import compiled_codecs

    weights = []
    for compiles in (False, True):
        if compiles:
            compiled_codecs(monkeypatch)
        training = Training("fused", OPTIONS[options], scaled=True)
        for batch in batches(4, spoilt=(2,)):
            training.step(batch)
        weights.append(training.fp32())
    assert weights[0] == weights[1]


@simulated
def test_launches_do_not_grow_with_the_number_of_weights() -> None:
    def launches(layers: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))).to(DEVICE)
        optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), fused=True), model)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        with Counted() as counted:
            optimizer.step()
        return counted.launches

    assert launches(4) == launches(32) <= 60
