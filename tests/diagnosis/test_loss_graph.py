"""A loss that is not finite is traced to the op and the line of the code between the model and `backward`."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from castwise import GradScaler, Monitor
from castwise.diagnosis._backward_calls import BACKWARD_CALLS
from castwise.diagnosis._loss_code import LossCode
from castwise.diagnosis._loss_graph import first_fault, nodes_of, saved_by

Loss = Callable[[Tensor, Tensor, bool], Tensor]


def trained(loss_of: Loss, *, bad: int = 3, scaler: Any = None, compiled: bool = False) -> list[dict[str, Any]]:
    """Train five steps of which one is bad, and return the diagnoses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    records: list[dict[str, Any]] = []
    with Monitor(model, optimizer, scaler, sinks=[records.append], on_nonfinite="diagnose"):
        for step in range(1, 6):
            inputs, targets = torch.randn(6, 4), torch.randint(0, 5, (6,))
            loss = loss_of(model(inputs), targets, step == bad)
            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    return [record for record in records if record["kind"] == "diagnosis"]


def log_of_zero(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    probabilities = logits.softmax(-1) * (0.0 if is_bad else 1.0)
    return -torch.log(probabilities[torch.arange(6), targets]).mean()  # here


def zero_times_log_of_zero(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    probabilities = logits.softmax(-1)
    probabilities = probabilities * (probabilities > (0.2 if is_bad else -1.0))
    entropy = -(probabilities * torch.log(probabilities)).sum(-1).mean()  # here
    return functional.cross_entropy(logits, targets) - 0.01 * entropy


def smoothed_over_masked_logits(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    mask = torch.zeros(6, 5, dtype=torch.bool).index_fill(1, torch.tensor([4]), is_bad)
    logits = logits.masked_fill(mask, -math.inf)
    return functional.cross_entropy(logits, targets.clamp(max=3), label_smoothing=0.1)  # here


def nan_among_targets(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    return functional.mse_loss(logits, torch.full((6, 5), math.nan if is_bad else 0.0))  # here


def nan_among_targets_of_one_sample(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    wanted = torch.zeros(6, 5).masked_fill(torch.tensor([[is_bad and row == 4] for row in range(6)]), math.nan)
    return functional.mse_loss(logits, wanted)  # here


def std_of_one(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    return logits[: 1 if is_bad else 6].std(dim=0).mean()  # here


def division_by_a_sum_of_zero(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    weights = torch.full((6,), 0.0 if is_bad else 1.0)
    losses = functional.cross_entropy(logits, targets, reduction="none") * weights
    return losses.sum() / weights.sum()  # here


def division_by_a_count_of_zero(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    losses = [functional.cross_entropy(logits, targets, reduction="sum")]
    return sum(losses) / torch.tensor(0 if is_bad else 6)  # here


def overflowing_exponential(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    return torch.stack([logits.mul(1e4 if is_bad else 1.0).exp().mean(), logits.mean()]).mean()  # here


def mean_of_nothing(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    return logits[targets == (9 if is_bad else targets[0])].mean()  # here


def division_of_unknown_numbers(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    lengths = logits.detach().norm(dim=-1) * torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0 if is_bad else 1.0])
    cosines = (logits + 1.0).sum(-1) / lengths  # here
    return 1.0 - cosines.mean()


def log1p_of_minus_one(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    p = (logits * (1e6 if is_bad else 1.0)).softmax(-1).amax(-1)
    return -torch.log1p(-p).mean()  # here


LOSSES = [
    (log_of_zero, "aten.log", "check for inputs that are 0 or negative"),
    (zero_times_log_of_zero, "aten.log", "check for inputs that are 0 or negative"),
    (smoothed_over_masked_logits, "aten.log_softmax", "mask with a finite number, such as -1e4"),
    (nan_among_targets, "aten.mse_loss", "an argument of the loss, such as the targets, is not finite"),
    (nan_among_targets_of_one_sample, "aten.mse_loss", "an argument of the loss, such as the targets, is not finite"),
    (std_of_one, "aten.std", "leave out groups of one"),
    (division_by_a_sum_of_zero, "aten.div", "check for divisors that are 0"),
    (division_by_a_count_of_zero, "aten.div", "check for divisors that are 0"),
    (overflowing_exponential, "aten.exp", "clamp the exponent"),
    (mean_of_nothing, "aten.mean", "it is the mean of no elements"),
    (division_of_unknown_numbers, "aten.div", "not all inputs of this op are known: check for divisors that are 0"),
    (log1p_of_minus_one, "aten.log1p", "check for inputs that are -1 or less"),
]


@pytest.mark.parametrize(("loss", "op", "advice"), LOSSES, ids=[loss.__name__ for loss, *_ in LOSSES])
def test_the_op_and_the_line_of_a_loss_that_is_not_finite(loss: Loss, op: str, advice: str) -> None:
    lines, first = inspect.getsourcelines(loss)
    (line,) = [first + place for place, text in enumerate(lines) if "# here" in text]
    (found,) = trained(loss)
    assert (found["step"], found["phase"], found["module"], found["op"]) == (3, "loss", "", op)
    assert f"{__file__}:{line}" in found["summary"]
    assert advice in found["advice"]
    assert found.get("sample", "") == ("sample 4 of the batch" if "one_sample" in loss.__name__ else "")
    assert torch.is_anomaly_enabled() is False


def test_the_index_in_the_dataset_is_known_of_a_target_that_is_not_finite() -> None:
    inputs, targets = torch.randn(64, 4), torch.randn(64, 1)
    targets[37] = math.inf
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    records: list[dict[str, Any]] = []
    with Monitor(model, optimizer, sinks=[records.append], on_nonfinite="diagnose"):
        for batch, wanted in DataLoader(TensorDataset(inputs, targets), 8, shuffle=True):
            optimizer.zero_grad()
            functional.mse_loss(model(batch), wanted).backward()
            optimizer.step()
    (found,) = [record for record in records if record["kind"] == "diagnosis"][:1]
    assert found["sample"].endswith(" of the batch, dataset[37]")


def root_of_zero(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    difference = logits - (logits.detach() if is_bad else 0.1)
    return difference.square().sum(-1).sqrt().mean()  # here


def power_of_zero(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    return (logits * (0 if is_bad else 1)).abs().pow(0.5).mean()  # here


def angle_of_zero(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    cosine = (logits - logits.detach()).sum(-1) + (1.0 if is_bad else 0.5)
    return torch.acos(cosine).mean()  # here


def branch_that_is_not_taken(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    probabilities = logits.softmax(-1) * (0 if is_bad else 1)
    logs = probabilities.log()  # here
    return torch.where(probabilities > 0, probabilities * logs, torch.zeros(6, 5)).sum(-1).mean() + 1


def divergence_that_is_clamped(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    apart = (200.0 if is_bad else 0.1) - logits  # nothing saves a difference: it is known from the result of exp
    return (apart.exp() - 1 - apart).clamp(-10, 10).mean()  # here


def energy_in_fp16(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
    scaled = (logits * (1e4 if is_bad else 1.0)).half()
    return torch.mul(scaled, scaled).float().mean()  # here


OF_BACKWARD = [
    (root_of_zero, "aten.sqrt", "add an epsilon inside, (x + 1e-8).sqrt()"),
    (power_of_zero, "aten.pow", "add an epsilon inside, (x + 1e-8) ** p"),
    (angle_of_zero, "aten.acos", "clamp its input to within 1 - 1e-6"),
    (divergence_that_is_clamped, "aten.exp", "clamp the exponent"),
    (branch_that_is_not_taken, "aten.log", "torch.where passes gradients of 0 to the branch that it does not take"),
]


@pytest.mark.parametrize(("loss", "op", "advice"), OF_BACKWARD, ids=[loss.__name__ for loss, *_ in OF_BACKWARD])
def test_the_op_of_a_finite_loss_whose_gradient_is_not_finite(loss: Loss, op: str, advice: str) -> None:
    lines, first = inspect.getsourcelines(loss)
    (line,) = [first + place for place, text in enumerate(lines) if "# here" in text]
    (found,) = trained(loss)
    assert (found["step"], found["cause"], found["op"]) == (3, "non-finite gradients", op)
    assert f"the gradient of {op} gives" in found["summary"]
    assert f"{__file__}:{line}" in found["summary"]
    assert advice in found["advice"]
    if loss is branch_that_is_not_taken:
        assert found["code"] == f"# instead of line {line}:\nlogs = probabilities.clamp_min(1e-12).log()"


def test_a_loss_that_only_overflows_in_fp16_is_to_be_computed_in_fp32() -> None:
    found, later = trained(energy_in_fp16)
    for record, op in ((found, "aten.mul"), (later, "aten.to")):
        assert (record["op"], record["remedy"]) == (op, "float32")
        assert record["advice"].startswith("compute the loss in fp32: call .float() on its arguments")
        assert 'with torch.autocast("cpu", enabled=False):' in record["code"]


def test_the_std_of_one_reward_is_named_although_it_is_in_no_graph() -> None:
    def advantages(rewards: Tensor) -> Tensor:
        std = rewards.std()  # here: the only one of this process
        return (rewards - rewards.mean()) / (std + 1e-4)

    def of_rewards(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
        count = 1 if is_bad else 6
        log_probs = logits[:count].log_softmax(-1).gather(1, targets[:count, None]).sum(-1)
        return -(log_probs * advantages(torch.arange(float(count)))).mean()

    vars(sys.modules[__name__]).pop("__warningregistry__", None)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        (found,) = trained(of_rewards)
    line = inspect.getsourcelines(advantages)[1] + 1
    assert found["op"] == "aten.std"
    assert f"test_loss_graph.py:{line}" in found["text"]
    assert "correction=0" in found["advice"]


def test_an_outlier_that_is_squared_is_told_by_its_size() -> None:
    (found,) = trained(lambda logits, _, bad: functional.mse_loss(logits, logits.detach() + 1e25 * bad), bad=5)
    assert found["op"] == "aten.mse_loss"
    assert "no format holds the result of such large inputs" in found["advice"]


def test_an_inf_that_the_model_makes_is_the_models_although_the_gradient_of_its_output_is_finite() -> None:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 1 / x.relu()  # here

    model = nn.Sequential(nn.Linear(4, 4), Inverse())
    nn.init.constant_(model[0].bias, -9.0)  # whatever the weights are, ReLU's results are zeros
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    records: list[dict[str, Any]] = []
    with Monitor(model, optimizer, sinks=[records.append], on_nonfinite="diagnose"):
        functional.smooth_l1_loss(model(torch.zeros(2, 4)), torch.ones(2, 4)).backward()
        optimizer.step()
    (found,) = [record for record in records if record["kind"] == "diagnosis"]
    assert (found["phase"], found["module"], found["op"]) == ("forward", "1", "aten.reciprocal")


def test_healthy_losses_are_not_diagnosed() -> None:
    for loss, *_ in [*LOSSES, *OF_BACKWARD]:
        assert not trained(loss, bad=0)


def test_under_a_scaler_too() -> None:
    (found,) = trained(log_of_zero, scaler=GradScaler("cpu", init_scale=4.0))
    assert (found["step"], found["phase"], found["op"]) == (3, "loss", "aten.log")


def test_a_loss_that_only_its_scale_makes_infinite_is_not_blamed() -> None:
    records = trained(lambda logits, *_: logits.square().mean() * 1e5, scaler=GradScaler("cpu", init_scale=2.0**127))
    assert records
    assert {record["op"] for record in records} == {""}


def test_a_fault_of_the_model_comes_before_that_of_the_loss() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - 10).sqrt()

    model = nn.Sequential(nn.Linear(4, 4), Root())
    optimizer, records = torch.optim.SGD(model.parameters(), 0.01), list[Any]()
    with Monitor(model, optimizer, sinks=[records.append], on_nonfinite="diagnose"):
        model(torch.ones(2, 4)).log().sum().backward()
        optimizer.step()
    (found,) = [record for record in records if record["kind"] == "diagnosis"]
    assert (found["phase"], found["module"], found["op"]) == ("forward", "1", "aten.sqrt")


def test_code_between_two_models_is_blamed_and_not_the_data() -> None:
    model, head = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
    both = nn.ModuleList([model, head])  # has no forward, so that each of the two is replayed alone
    optimizer, records = torch.optim.SGD(both.parameters(), 0.01), list[Any]()
    with Monitor(both, optimizer, sinks=[records.append], on_nonfinite="diagnose"):
        for step in range(3):
            x = torch.randn(6, 4).masked_fill(torch.tensor([[step == 2 and row == 4] for row in range(6)]), 0.0)
            z = model(x)
            z = z / z.norm(dim=-1, keepdim=True)  # here, between
            head(z).logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (found,) = [record for record in records if record["kind"] == "diagnosis"]
    assert (found["phase"], found["op"]) == ("loss", "aten.div")
    assert "# here, between" in found["text"]
    assert "divisors that are 0" in found["advice"]


def test_a_line_is_known_although_the_graph_has_changed_if_the_op_has_only_one() -> None:
    def loss(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
        extra = logits.square().mean() * 0.1 if is_bad else 0.0
        return log_of_zero(logits, targets, is_bad) + extra

    (found,) = trained(loss)
    assert "aten.log gives" in found["summary"]
    assert f"{__file__}:" in found["summary"]


def test_custom_functions_and_what_is_not_known_are_admitted() -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, is_bad: bool) -> Tensor:
            return x * math.nan if is_bad else x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient, None

    (found,) = trained(lambda logits, _, is_bad: Odd.apply(logits, is_bad).mean())  # type: ignore[no-untyped-call]
    assert found["phase"] == "loss"
    assert found["summary"].startswith("In the loss, ")


def test_the_scripts_own_anomaly_mode_is_kept() -> None:
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        trained(log_of_zero, bad=0)
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()
    finally:
        torch.autograd.set_detect_anomaly(False)


def test_nothing_is_kept_of_steps_that_are_over() -> None:
    trained(log_of_zero, bad=0)
    assert not BACKWARD_CALLS.losses
    assert BACKWARD_CALLS.fault is None


def test_what_a_model_masks_with_minus_infinity_is_named_where_the_loss_reads_it() -> None:
    class Masking(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).masked_fill(torch.arange(5) == 4, -math.inf)

    model = Masking(4, 5)
    optimizer, records = torch.optim.SGD(model.parameters(), 0.01), list[Any]()
    with Monitor(model, optimizer, sinks=[records.append], on_nonfinite="diagnose"):
        for _ in range(2):
            logits = model(torch.ones(2, 4)).double()
            functional.cross_entropy(logits, torch.tensor([0, 1]), label_smoothing=0.1).backward()
            optimizer.step()
    found = next(record for record in records if record["kind"] == "diagnosis")
    assert found["summary"].startswith("In the loss, aten.log_softmax reads inf, at ")
    assert "the loss reads an inf or NaN from the model's output, such as -inf in masked logits" in found["advice"]


def test_weights_that_the_step_has_written_are_not_blamed_later() -> None:
    weight, code = nn.Parameter(torch.ones(3)), LossCode()
    loss = weight.square().sum() + torch.log(weight.sum() - 3)
    code.backward_begins(loss, is_finite=True)  # as on an accelerator, where it is not known
    losses = code.take(None)
    with torch.no_grad():
        weight.fill_(math.nan)
    found = losses.fault(of_model=False)
    assert found is not None
    assert (found.op, found.remedy) == ("aten.log", "code")


def test_what_was_freed_since_the_forward_is_not_read() -> None:
    """FSDP frees gathered weights, which the graph of the loss still holds."""
    inputs, weight = (torch.full((3, 3), value, requires_grad=True) for value in (torch.inf, 0.0))
    gathered = weight * 1.0
    loss = torch.log(inputs @ gathered).sum()
    nodes = nodes_of(loss, lambda number: False)
    saved = [saved_by(node) for node in nodes]
    gathered.untyped_storage().resize_(0)
    found = first_fault(loss, nodes, {}, saved)
    assert found is not None
    assert (found.name, found.reads) == ("aten.mm", "argument")


def test_a_checkpointed_loss_is_not_called_again_by_watching() -> None:
    calls = 0

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return functional.cross_entropy(logits.exp(), targets)

    def checkpointed(logits: Tensor, targets: Tensor, is_bad: bool) -> Tensor:
        return checkpoint(loss_of, logits * (torch.inf if is_bad else 1.0), targets, use_reentrant=False)

    (found,) = trained(checkpointed)[:1]
    assert found["summary"].startswith("In the loss, aten.mul reads inf, at ")
    assert calls == 2 * 5  # in each step for the loss, and for its backward
