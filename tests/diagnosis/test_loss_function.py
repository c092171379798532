"""The code of a loss is repeated with other outputs of the model, from the graph of the loss alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from castwise.diagnosis._loss_code import LOSS_CODE
from castwise.diagnosis._loss_function import UnknownLossError
from castwise.diagnosis._recording import Recording

LossCode = Callable[[torch.Tensor], torch.Tensor]

LABELS, TARGETS, WEIGHTS = torch.tensor([0, 3, -100, 5, 1, 1]), torch.rand(6, 8), torch.rand(8)
PARAMETER = nn.Parameter(torch.ones(3))
CODES: list[LossCode] = [
    lambda out: functional.cross_entropy(out, LABELS),
    lambda out: functional.cross_entropy(out, LABELS, WEIGHTS, label_smoothing=0.1) / 3,
    lambda out: functional.cross_entropy(out.view(2, 3, 8)[:, :-1].reshape(-1, 8), LABELS[[0, 1, 3, 4]]),
    lambda out: functional.cross_entropy(out.view(3, 2, 8).transpose(1, 2), LABELS.view(3, 2)),
    lambda out: -(out.log_softmax(-1) * TARGETS).sum(-1).mean(),
    lambda out: functional.nll_loss(out.bfloat16().log_softmax(-1, dtype=torch.float32), LABELS, reduction="sum"),
    lambda out: functional.mse_loss(out, TARGETS) + 0.1 * out.square().mean(),
    lambda out: functional.smooth_l1_loss(out.sigmoid(), TARGETS, beta=0.3) * 2.0,
    lambda out: functional.binary_cross_entropy_with_logits(out, TARGETS, pos_weight=WEIGHTS),
    lambda out: (out.float() - TARGETS).abs().clamp(max=0.7).sum() / torch.tensor(48.0),
    lambda out: 0.3 + (TARGETS - 2.0 * out).square().mean(),
    lambda out: torch.sub(TARGETS, out, alpha=3).square().sum() + (out - TARGETS).square().sum(),
    lambda out: functional.cross_entropy(torch.cat([out, out.flip(0)]), LABELS.repeat(2)),
    lambda out: functional.kl_div(out.log_softmax(-1), TARGETS, reduction="batchmean"),
    lambda out: -torch.distributions.Normal(out, 2.0).log_prob(TARGETS).mean(),
    lambda out: torch.where(TARGETS > 0.5, -out.log_softmax(-1), 3.0).sum() / 6,
    lambda out: -out.log_softmax(-1)[torch.arange(6), LABELS.clamp(min=0)].mean(),
    lambda out: sum(functional.mse_loss(*pair, reduction="sum") for pair in zip(out, TARGETS, strict=True)) / 48,
    lambda out: functional.mse_loss(out, TARGETS) + 0.1 * PARAMETER.square().sum(),
]


@pytest.fixture(autouse=True)
def _repeats() -> Iterator[None]:
    LOSS_CODE.repeats += 1
    yield
    LOSS_CODE.repeats -= 1


def repeated(code: LossCode) -> tuple[float, float]:
    """Return the loss that is repeated with other outputs than those it was computed from, and what it should be."""
    model, other = nn.Linear(4, 8), torch.randn(6, 8)
    recording = Recording(model)
    recording.attach()
    code(model(torch.randn(6, 4))).backward()
    batches = recording.take()
    recording.detach()
    PARAMETER.data.add_(1.0)  # as an optimizer does; the loss reads what it is when the loss is repeated
    (batch,), losses = batches, batches.losses
    assert losses is not None
    (function,) = losses.as_functions()
    assert function.reads == set(batch.edges)
    return function({batch.edges[0]: other}), float(code(other))


@pytest.mark.parametrize("number", range(len(CODES)))
def test_a_loss_is_repeated_with_other_outputs(number: int) -> None:
    again, expected = repeated(CODES[number])
    assert again == pytest.approx(expected, rel=1e-6)


def test_large_results_are_dropped_and_the_loss_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castwise.diagnosis._loss_code._MOST_BYTES", 8)
    monkeypatch.setattr("castwise.diagnosis._loss_code._MOST_BYTES_OF_TARGETS", 64)
    again, expected = repeated(CODES[0])
    assert again == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_a_model_returns_needs_no_code() -> None:
    class Model(nn.Linear):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return nn.Linear.forward(self, given).square().mean()

    recording = Recording(model := Model(4, 8))
    recording.attach()
    (model(torch.ones(6, 4)) / 2).backward()
    model(torch.ones(6, 4)).backward()
    first, second = batches = recording.take()
    recording.detach()
    assert batches.losses is not None
    half, whole = batches.losses.as_functions()
    outputs = {first.edges[0]: torch.tensor(3.0), second.edges[0]: torch.tensor(5.0)}
    assert (half(outputs), whole(outputs)) == (1.5, 5.0)
    assert float(whole.loss) == pytest.approx(float(model(torch.ones(6, 4))))


def test_what_is_not_known_is_admitted() -> None:
    with pytest.raises(UnknownLossError, match="not all arguments of Sub are known"):
        repeated(lambda out: (TARGETS * out - TARGETS).sum(-1).tanh().sum())
    with pytest.raises(UnknownLossError, match="not all arguments of _Double are known"):
        repeated(lambda out: _Double.apply(out).sum())


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, given: torch.Tensor) -> torch.Tensor:
        return 2.0 * given

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # of one result
        return 2.0 * gradient
