"""Where a spike of the loss began: its cause is named, and nothing is said of healthy runs."""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise._invariants import written_weights
from castwise._invariants.invariant import Exemptions
from castwise._invariants.loss_spikes import LossSpikes
from castwise._invariants.spike import NoReplays, PendingSpike, Spike, SpikeTrial
from castwise._invariants.written_weights import Written, WrittenWeights
from castwise.monitor import expected_writes

FAULT = 60  # the step


class Training:
    """A small model that is trained in bf16 under a monitor, with a fault in one step."""

    def __init__(
        self,
        fault: str = "",
        steps: int = 66,
        between: Callable[[nn.Module, int], object] | None = None,
        *,
        has_norm: bool = False,
        numbers_from: int = 0,
        **options: Any,
    ):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(nn.Embedding(32, 16), nn.Flatten(), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 32), nn.Dropout(0.01)),
            *[nn.BatchNorm1d(32)] * has_norm,
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        if fault == "weights under Adam":
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.labels = torch.randint(32, (32,))
        self.records: list[dict[str, Any]] = []
        options = {"spikes": True, "every": 1000} | options
        with (
            warnings.catch_warnings(record=True) as warned,
            castwise.Monitor(self.model, self.optimizer, sinks=[self.records.append], **options) as monitor,
        ):
            warnings.simplefilter("always")
            for step in range(1, steps + 1):
                if numbers_from:
                    monitor.step = numbers_from + step
                self.step(fault, step)
                if between is not None:
                    between(self.model, step)
        self.warned = [str(warning.message) for warning in warned]

    def step(self, fault: str, step: int) -> None:
        x = torch.randint(32, (16, 8))
        y = self.labels[x[:, 0]]
        if step >= FAULT and fault == "data":
            y = (y + 1) % 32
        if step == FAULT:
            y = torch.randint(32, (16,)) if fault == "batch" else y
            self.plant(fault)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            factor = {("batch", step == FAULT): 40.0, ("data", step >= FAULT): 4.0}.get((fault, True), 1.0)
            loss = 0.2 + nn.functional.cross_entropy(self.model(x) * 0.5, y) * factor
        loss.backward()
        if step == FAULT and fault == "gradient element":
            self.model[2].weight.grad.view(-1)[5] = 1e6
        self.optimizer.step()
        self.optimizer.zero_grad()
        if step == FAULT + 1 and fault == "learning rate":
            self.optimizer.param_groups[0]["lr"] = 0.05

    def plant(self, fault: str) -> None:
        if fault == "written weights":
            self.model[4].weight.data.mul_(100.0)
        elif fault == "flipped bit":
            self.model[2].weight.data.view(-1).view(torch.int32)[77] ^= 1 << 30
        elif fault == "weights":
            for state in self.optimizer.state.values():
                state["momentum_buffer"].mul_(1000.0)
        elif fault == "weights under Adam":
            for state in self.optimizer.state.values():
                state["exp_avg"].mul_(300.0)
        elif fault == "learning rate":
            self.optimizer.param_groups[0]["lr"] = 500.0

    def broken(self, name: str, severity: str = "warning") -> list[dict[str, Any]]:
        records = [record for record in self.records if record["kind"] == "invariant"]
        return [record for record in records if (record["name"], record["severity"]) == (name, severity)]


def fail(*_: object) -> None:
    raise RuntimeError("no")


CAUSES = {
    "written weights": "4.weight was written outside the optimizer between steps 59 and 60 in 1,024 of 1,024 ",
    "flipped bit": "Bit 30 of element 77 of 2.weight was flipped between steps 59 and 60",
    "learning rate": "The learning rate rose from 0.05 to 500 at step 60.",
    "gradient element": (
        "At step 60, one element had 1 of the norm of 2.weight's gradient. A second backward differs in that element "
        "alone."
    ),
    "batch": "The loss was back one step later. Replayed: the batch at the weights of step 33: loss ",
    "data": "Replayed: the batch at the weights of step 33: loss ",
    "weights": "Replayed: the batch at the weights of step 33: loss ",
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_of_a_spike_is_named(cause: str) -> None:
    training = Training(cause)
    (spike,) = training.broken("loss-spike")
    assert f"Cause: {cause}. {CAUSES[cause]}" in spike["text"]
    assert spike["step"] <= FAULT + 4
    (norms,) = [record for record in training.records if record["kind"] == "norms"]
    first, last = norms["steps"][0], norms["steps"][-1]
    assert (first, norms["step"] + last) == (-32, 66)
    assert {"0.weight", "2.weight", "2.bias", "4.weight", "4.bias"} == set(norms["norms"])
    assert all(len(each) == len(norms["steps"]) and min(each) > 0.0 for each in norms["norms"].values())
    if "Replayed: " in CAUSES[cause]:
        check_replay(spike, cause)
    elif cause != "learning rate":
        tried = re.search(r" Tried: the loss of that batch is (\S+) at the weights of step 33\.$", spike["remedy"])
        assert tried is not None
        assert 3.0 < float(tried[1]) < 3.5  # that of other batches in step 33


def test_a_weight_that_was_scaled_has_its_factor_and_one_that_was_replaced_its_norms() -> None:
    before = torch.arange(1.0, 101.0)
    replaced = torch.randn(100, generator=torch.Generator().manual_seed(0))
    where = "w was written outside the optimizer between steps 6 and 7 in 100 of 100 elements"
    assert str(written_weights._written(7, "w", before * -3.0, before)) == f"{where}, by a factor of -3"
    text = f"{where}; its norm was {before.norm():.4g}, and became {replaced.norm():.4g}"
    assert str(written_weights._written(7, "w", replaced, before)) == text
    text = f"{where}; its norm was 0, and became {before.norm():.4g}"
    assert str(written_weights._written(7, "w", before, torch.zeros(100))) == text


OPTIMIZERS: dict[str, Any] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.003, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.003, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.001, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02, "lr_decay": 0.001, "weight_decay": 0.01}),
    "one group alone": (torch.optim.SGD, {"lr": 0.05}),
    "a class of the script's": (type("Own", (torch.optim.SGD,), {}), {"lr": 0.05}),
}


def with_rates(kind: str, *, rises: bool) -> list[dict[str, Any]]:
    """Return the records of a run in two groups, whose rates may rise in one step, up to the next one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Flatten(), nn.Linear(128, 32), nn.Dropout(0.01), nn.Linear(32, 32))
    make, options = OPTIMIZERS[kind]
    groups = [{"params": model[:3].parameters()}, {"params": model[4].parameters(), "lr": 0.5 * options["lr"]}]
    optimizer, labels, records = make(groups, **options), torch.randint(32, (32,)), []
    with warnings.catch_warnings(), castwise.Monitor(model, optimizer, sinks=[records.append], spikes=True):
        warnings.simplefilter("ignore")
        for step in range(1, FAULT + 2):
            for group in optimizer.param_groups[: 1 if kind == "one group alone" else 2]:
                group["lr"] *= 3000.0 if rises and step == FAULT else 1.0
            x = torch.randint(32, (16, 8))
            nn.functional.cross_entropy(model(x), labels[x[:, 0]]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return records


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_lower_rate_is_tried_and_gives_the_loss_of_a_run_without_the_rise(kind: str) -> None:
    records, without = (with_rates(kind, rises=rises) for rises in (True, False))
    (spike,) = [each for each in records if each.get("name") == "loss-spike" and each["severity"] == "warning"]
    assert "Cause: learning rate." in spike["text"]
    tried = re.search(r"Tried: with the rate of before at step 60, the loss of that batch is (\S+)\.$", spike["remedy"])
    if kind in ("one group alone", "a class of the script's"):
        assert tried is None
        return
    assert tried is not None
    (loss,) = [record["loss"] for record in without if (record["kind"], record.get("step")) == ("step", FAULT + 1)]
    assert float(tried[1]) == pytest.approx(loss, rel=2e-3)


def losses_alone() -> LossSpikes:
    """Return what looks at losses without a model."""
    return LossSpikes(Exemptions(), lambda _: True, looks_at_gradients=False, replays=NoReplays("of no model"))


class AfterAnotherEvent(Training):
    """A bad batch, three steps after what has no effect on it: another learning rate, or a write."""

    event = ""

    def step(self, fault: str, step: int) -> None:
        if step == FAULT - 3 and self.event == "a rate":
            self.optimizer.param_groups[0]["lr"] = 0.1
        elif step == FAULT - 3:
            self.model[4].bias.data.add_(1e-3)
        super().step(fault, step)


@pytest.mark.parametrize("event", ["a rate", "a write"])
def test_an_event_is_not_the_cause_if_the_loss_is_as_high_without_it(
    event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AfterAnotherEvent, "event", event)
    (spike,) = AfterAnotherEvent("batch").broken("loss-spike")
    assert "Cause: batch. The loss was back one step later. Replayed: " in spike["text"]
    seen = "The learning rate rose from 0.05 to 0.1" if event == "a rate" else "4.bias was written outside the"
    assert re.search(rf" {seen} .*\. That is not it: .*the loss of that batch is ", spike["text"])
    assert ("no learning rate rose" in spike["text"]) is (event == "a write")
    assert ("no weight was written" in spike["text"]) is (event == "a rate")


def test_the_learning_rate_of_each_group_is_seen() -> None:
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": weights[:1], "lr": 0.1}, {"params": weights[1:], "lr": 1e-4}])
    watch = losses_alone()
    found = []
    for step in range(1, 60):
        optimizer.param_groups[1]["lr"] = 1e-4 if step < 50 else 1e-3
        found += watch.before_step(optimizer, step, dict, None)
    (jump,) = found
    assert jump.text == "the learning rate of group 1 rose from 0.0001 to 0.001 at step 50."


def test_a_spike_before_a_nan_is_reported_in_the_step_of_the_nan() -> None:
    losses = [1.0 + 0.01 * (step % 5) for step in range(50)]
    watch = losses_alone()
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    found = [[*watch.step_known(optimizer, step, loss, None)] for step, loss in enumerate([*losses, 9e9, math.nan], 1)]
    assert [spike.step for spike in found[-1]] == [51]
    assert found[-1][0].evidence.startswith("The loss was not back one step later")
    assert not [*watch.end()]


@pytest.mark.parametrize(("rate", "severity"), [(1.0, None), (1.02, "note"), (1.05, "warning")])
def test_a_loss_that_rises_slowly_is_told_at_the_end(rate: float, severity: str | None) -> None:
    draw = random.Random(0)
    watch = losses_alone()
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    for step in range(1, 400):
        loss = (1.0 + 2.0 * 0.97**step) * draw.lognormvariate(0.0, 0.1) * rate ** max(0, step - 200)
        assert not [*watch.step_known(optimizer, step, loss, None)]
    assert [each.severity for each in watch.risen()] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("usual_now", "following", "cause"),
    [(0.31, 2.15, "batch"), (0.31, 3.4, "data"), (2.8, 2.15, "unknown"), (9.0, 2.15, "weights")],
)
def test_if_weights_are_no_worse_a_batch_that_is_high_with_earlier_ones_is_the_cause(
    usual_now: float, following: float, cause: str
) -> None:
    spike = Spike(60, 6.725, 0.7275, 24.0, "unknown", "")
    pending = PendingSpike(spike, SpikeTrial(33, 3.75, 2.47, usual_now, 1.07), "")
    assert pending.judged(is_back=cause == "batch", following=following).cause == cause


def test_of_steps_with_numbers_of_the_loop_the_cause_is_named_too() -> None:
    (spike,) = Training("written weights", numbers_from=1000).broken("loss-spike")
    assert "at step 1,060" in spike["text"]
    assert "Cause: written weights. 4.weight was written outside the optimizer between steps 1,059 and" in spike["text"]


def check_replay(spike: dict[str, Any], cause: str) -> None:
    """Check the losses that a replay has given, and that they are printed with the remedy."""
    numbers = r"step 33: loss (\S+), usual (\S+); the next batch: (\S+); earlier batches now: (\S+)\."
    found = re.search(numbers, spike["text"])
    assert found is not None
    loss, usual, following, now = map(float, found.groups())
    assert (loss > 1.2 * usual) is (cause != "weights")
    assert (following > 1.2 * usual) is (cause == "data")
    assert (now > 1.2 * usual) or cause != "weights"
    tried = {
        "batch": f"Tried: the loss of the next one is {found[3]} at the weights of step 33.",
        "data": "Tried: the loss is as high at the weights of step 33.",
        "weights": f"Tried: the loss is {found[1]} at the weights of step 33.",
    }
    assert spike["remedy"].endswith(tried[cause])


def replayed_not(**options: Any) -> str:
    """Return why the spike of a batch was not replayed, after the batch was named for what is known without."""
    (spike,) = Training("batch", **options).broken("loss-spike")
    assert "Cause: batch. The loss was back one step later." in spike["text"]
    return str(spike["text"]).partition("Not replayed: ")[2]


def test_where_a_loss_is_not_replayed_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = "castwise.monitor._loss_replays"
    with monkeypatch.context() as patched:
        patched.setattr("castwise.monitor._monitor.can_be_replayed", lambda _: False)
        patched.setattr(f"{replays}.LossReplays.__init__", fail)  # no replay is even prepared
        assert replayed_not() == "a forward exchanges tensors with other ranks."
    with monkeypatch.context() as patched:
        patched.setattr(f"{replays}._SAME", -1.0)
        assert re.fullmatch(r"the loss of step 33 was \S+, and repeated \S+\.", replayed_not())
    with monkeypatch.context() as patched:
        patched.setattr(f"{replays}._outputs_again", fail)
        assert replayed_not() == "it raised RuntimeError."
    with monkeypatch.context() as patched:
        patched.setattr("castwise.diagnosis._trials.SECONDS", -1.0)
        assert replayed_not() == "time ran out."


@pytest.mark.parametrize("shares_loss", [True, False])
def test_of_several_optimizers_each_loss_is_judged_once_and_repeated(shares_loss: bool) -> None:
    torch.manual_seed(0)
    model, labels = nn.Sequential(nn.Embedding(32, 16), nn.Flatten(), nn.Linear(128, 32)), torch.randint(32, (32,))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9) for part in (model[0], model[2])]
    records: list[dict[str, Any]] = []
    with warnings.catch_warnings(), castwise.Monitor(model, optimizers, sinks=[records.append], spikes=True):
        warnings.simplefilter("ignore")
        for step in range(1, 64):
            for stepped in [optimizers] if shares_loss else [optimizers[:1], optimizers[1:]]:
                if step == 60:
                    for state in [state for optimizer in stepped for state in optimizer.state.values()]:
                        state["momentum_buffer"].mul_(3000.0)
                x = torch.randint(32, (16, 8))
                (0.2 + nn.functional.cross_entropy(model(x), labels[x[:, 0]])).backward()
                for optimizer in stepped:
                    optimizer.step()
                model.zero_grad()
    spikes = [each for each in records if each.get("name") == "loss-spike" and each["severity"] == "warning"]
    assert ["Cause: weights. Replayed: " in spike["text"] for spike in spikes] == [True] * (1 if shares_loss else 2)


def test_a_large_element_that_the_backward_gives_again_is_no_fault() -> None:
    torch.manual_seed(0)
    weight, x = nn.Linear(20, 20, bias=False), torch.full((4, 20), 1e-3)
    x[:, 3] = 1.0
    optimizer = torch.optim.SGD(weight.parameters(), lr=1e-3)
    records: list[dict[str, Any]] = []
    with warnings.catch_warnings(), castwise.Monitor(weight, optimizer, sinks=[records.append], spikes=True):
        warnings.simplefilter("ignore")
        for step in range(1, 61):
            loss = 100.0 + weight(x)[:, 5].sum()
            (100.0 * loss if step == 60 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    (spike,) = [record for record in records if record["kind"] == "invariant" and record["severity"] == "warning"]
    assert "gradient element" not in spike["text"]


def test_norms_are_context_and_blame_nothing() -> None:
    (spike,) = Training("weights under Adam").broken("loss-spike")
    grown = re.search(r"The norm of all weights is (\S+) times that of step 33\.", spike["text"])
    assert grown is not None
    assert float(grown[1]) > 1.05
    assert re.search(r"Beside its second moment, the gradient of \S+ was largest: \S+ times the root\.", spike["text"])
    assert "Cause: weights." in spike["text"]
    assert not spike.get("parameters")


@pytest.mark.parametrize("spikes", [True, False])
def test_only_what_would_have_been_seen_is_ruled_out(spikes: bool) -> None:
    options = {} if spikes else {"spikes": False, "invariants": True, "on_nonfinite": "diagnose"}
    (spike,) = Training("batch", **options).broken("loss-spike")
    assert ("no weight was written" in spike["text"]) is spikes
    assert ("no element had" in spike["text"]) is spikes
    assert ("--spikes also looks at" in spike["text"]) is not spikes
    assert "no learning rate rose" in spike["text"]


def test_a_healthy_run_has_no_spike_and_no_writes() -> None:
    training = Training(steps=130)
    assert [record for record in training.records if record["kind"] in ("invariant", "norms")] == []
    steps = [record for record in training.records if record["kind"] == "step"]
    assert {step["lr"] for step in steps} == {0.05}
    assert all(step["loss"] is not None for step in steps)


def test_without_copies_a_write_is_named_and_what_copies_would_tell() -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records: list[dict[str, Any]] = []
    with castwise.Monitor(model, optimizer, sinks=[records.append], invariants=True):
        for step in range(9):
            if step in (2, 7):  # the first is in none of the steps that are compared
                model.weight.data.view(-1)[5] += 1.0
            model(torch.randn(2, 300)).square().mean().backward()
            optimizer.step()
    (note,) = [record for record in records if record["kind"] == "invariant"]
    assert note["text"] == (
        "weight was written outside the optimizer between steps 7 and 8. With --spikes, castwise tells which elements."
    )


def test_expected_writes_are_not_reported_and_others_before_them_are() -> None:
    def write(model: nn.Module, step: int) -> None:
        if step == 20:
            with expected_writes():
                model[4].bias.data.zero_()
        if step == 30:
            model[2].bias.data.add_(1.0)
            with expected_writes():
                model[4].bias.data.zero_()

    (note,) = Training(steps=35, between=write).broken("written-weights", "note")
    assert note["parameters"] == ["2.bias"]
    assert "between steps 30 and 31" in note["text"]


def test_a_script_that_always_writes_is_asked_about_it_only_at_first() -> None:
    def clamp(model: nn.Module, step: int) -> None:
        model[2].weight.data.clamp_(-0.05, 0.05)

    notes = Training(steps=50, between=clamp).broken("written-weights", "note")
    assert [note["step"] for note in notes] == [2]


def test_weights_that_are_replaced_or_converted_are_no_writes() -> None:
    def change(model: nn.Module, step: int) -> None:
        if step == 10:
            model[2].weight.data = 1.01 * model[2].weight.data.clone().bfloat16()
        if step == 20:
            model.float()

    training = Training(steps=30, between=change)
    assert training.broken("written-weights", "note") == []
    assert not any("does not check" in text for text in training.warned)


WEIGHTS = {
    "whole words": torch.randn(6, 4),
    "an odd number of bytes": torch.randn(7).bfloat16(),
    "one number": torch.randn(()),
    "float64": torch.randn(3, dtype=torch.float64),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "a part of a tensor": torch.randn(9)[3:],
}


def compared(weight: nn.Parameter, between: Callable[[], object], *, copies: bool = True) -> list[Written]:
    """Return what is found to be written of a weight, and of one beside it, between two steps."""
    other = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([weight, other], lr=0.1)
    watch = WrittenWeights(lambda: {"weight": weight, "other": other}, Exemptions(), lambda: 2, copies=copies)
    for _ in range(7):  # copies are made into the memory of those before; without them, the eighth step is compared
        watch.after_step(optimizer)
    assert watch.before_step(optimizer) == []
    between()
    return watch.before_step(optimizer)


@pytest.mark.parametrize("is_moved", [False, True])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_one_changed_bit_is_found_in_weights_of_any_layout(kind: str, is_moved: bool) -> None:
    weight = nn.Parameter(WEIGHTS[kind].clone(memory_format=torch.preserve_format))
    numbers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.itemsize]

    def flip() -> None:
        if is_moved:
            weight.data = weight.detach().clone()
        flat = weight.detach().reshape(-1)
        flat.view(numbers)[-1] ^= 1 << 5
        weight.data.copy_(flat.view_as(weight))

    (found,) = compared(weight, flip)
    assert (found.name, found.flipped) == ("weight", (weight.numel() - 1, 5))


@pytest.mark.parametrize("how", ["freed", "shorter", "transposed", "moved"])
@pytest.mark.parametrize("copies", [False, True])
def test_weights_without_the_memory_that_they_had_are_no_writes(how: str, copies: bool) -> None:
    weight = nn.Parameter(torch.randn(6 if copies else 70_000, 4))

    def change() -> None:
        if how == "freed":
            weight.untyped_storage().resize_(0)
        else:
            weight.data = {
                "shorter": torch.zeros(3),
                "transposed": weight.detach().t().contiguous().t(),
                "moved": weight.detach().clone(),
            }[how]

    assert compared(weight, change, copies=copies) == []


def test_what_rounding_leaves_of_a_sum_that_is_taken_off_again_is_no_flipped_bit() -> None:
    def perturb(model: nn.Module, step: int) -> None:
        if step == 10:
            model[2].weight.data.view(-1).view(torch.int32)[7] ^= 1
        if step in (20, 31):  # more than rounding, but not alone, or soon after other writes
            model[2].weight.data.view(-1).view(torch.int32)[7] ^= 1 << 5
            model[4].weight.data.view(-1).view(torch.int32)[7] ^= (step < 30) << 5

    training = Training(steps=40, between=perturb)
    assert training.broken("written-weights") == []
    notes = [note["text"] for note in training.broken("written-weights", "note")]
    assert notes[0] == (
        "2.weight was written outside the optimizer between steps 10 and 11 in 1 of 4,096 elements, by a factor of 1."
    )
    assert ["So were 4.weight" in text for text in notes] == [False, True]


def test_looking_for_spikes_changes_no_bit() -> None:
    def trained(fault: str, **options: Any) -> list[torch.Tensor]:
        training = Training(fault, steps=63, has_norm=True, **options)
        assert len(training.broken("loss-spike")) == (options == {} and fault == "batch")
        assert all("Replayed: " in spike["text"] for spike in training.broken("loss-spike"))
        kept = [value for state in training.optimizer.state.values() for value in state.values()]
        return [*training.model.state_dict().values(), *kept, torch.rand(3), torch.tensor(random.random())]

    for fault in ("batch", "gradient element"):  # which repeat a loss and a backward
        random.seed(0)
        watched = trained(fault)
        random.seed(0)
        assert all(map(torch.equal, watched, trained(fault, spikes=False)))


def test_a_check_of_losses_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castwise._invariants.written_weights.WrittenWeights.after_step", fail)
    monkeypatch.setattr("castwise._invariants.loss_spikes.LossSpikes.step_known", fail)
    assert len([record for record in Training(steps=5).records if record["kind"] == "step"]) == 5


def spikes_in(losses: list[float]) -> list[Spike]:
    watch, optimizer = (
        LossSpikes(Exemptions(), lambda _: False, looks_at_gradients=False, replays=NoReplays("there is no model")),
        torch.optim.SGD([torch.zeros(1)]),
    )
    found: list[Spike] = []
    for step, loss in enumerate(losses, 1):
        found += watch.step_known(optimizer, step, loss, None)
    return [*found, *watch.end()]


def test_spikes_are_told_from_noise_by_the_spread_of_the_run() -> None:
    draw = random.Random(0)
    losses = [3.0 * 0.999**step * draw.lognormvariate(0.0, 0.05) for step in range(3000)]
    assert spikes_in(losses) == []
    losses[500] *= 1.5
    losses[1000:1003] = [9.0, 9.0, 9.0]
    first, second = spikes_in(losses)
    assert (first.step, first.cause, second.step, second.cause) == (501, "batch", 1001, "unknown")
    assert "castwise report RUN" in second.report().remedy
    assert first.sigmas > 6.0


def test_while_losses_fall_a_spike_is_told_by_how_much_they_differ_from_step_to_step() -> None:
    draw = random.Random(0)
    losses = [(5.0 * 0.97**step + 0.05) * draw.lognormvariate(0.0, 0.05) for step in range(300)]
    assert spikes_in(losses) == []
    usual = losses[70]
    losses[70] *= 5.0
    (spike,) = spikes_in(losses)
    assert (spike.step, spike.cause) == (71, "batch")
    assert usual < spike.usual < 1.2 * usual
    losses[71:75] = [5.0 * loss for loss in losses[71:75]]
    assert [(spike.step, spike.cause) for spike in spikes_in(losses)] == [(71, "unknown")]


@pytest.mark.parametrize(("every", "reported"), [(10, []), (16, []), (50, [50, 100])])
def test_a_term_of_the_loss_that_is_rare_is_no_spike_or_two(every: int, reported: list[int]) -> None:
    draw = random.Random(0)
    losses = [draw.lognormvariate(0.0, 0.05) + (step % every == 0) * draw.uniform(8, 12) for step in range(1, 400)]
    assert [spike.step for spike in spikes_in(losses)] == reported
    losses[319] = 300.0
    assert [spike.step for spike in spikes_in(losses)] == [*reported, 320]


def test_a_spike_in_the_last_step_is_reported_and_another_level_of_the_loss_is_learned() -> None:
    draw = random.Random(0)
    noise = [draw.lognormvariate(0.0, 0.05) for _ in range(300)]
    (last,) = spikes_in([*noise[:50], 3.0])
    assert last.evidence == "The run ended before the next step."
    assert len(spikes_in([*noise[:50], *(4.0 * each for each in noise)])) == 1
    assert spikes_in([-each for each in noise]) == []
