"""What looks like a mistake and is none, and what a `Monitor` finds without anything being installed."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import pickletools
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import castwise
from castwise._mistakes.mistake import Mistake
from castwise._mistakes.scaled_gradients import ScaledGradient
from castwise._mistakes.watch import WATCH, MixedPrecisionMistake
from castwise.amp._observers import OBSERVERS


class Training:
    """A model, its optimizer and a scaler of castwise's, and the parts of a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = castwise.GradScaler("cpu", init_scale=1024.0)

    def loss(self, x: torch.Tensor | None = None) -> torch.Tensor:
        with castwise.autocast("cpu", dtype=torch.float16):
            return nn.functional.mse_loss(self.model(torch.randn(4, 8) if x is None else x), torch.zeros(4, 1))

    def backward(self, factor: float = 1.0) -> None:
        self.scaler.scale(self.loss() * factor).backward()

    def finish(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Subscriber:
    """Receives mistakes."""

    def receive(self, mistake: Mistake) -> None:
        pass


@pytest.fixture
def training() -> Iterator[Training]:
    subscriber = Subscriber()
    WATCH.subscribe(subscriber.receive, of_gradients=True)
    try:
        yield Training()
    finally:
        WATCH.unsubscribe(subscriber.receive)
    assert OBSERVERS == []


def norm(model: nn.Module) -> float:
    return sum(float(p.grad.norm()) ** 2 for p in model.parameters() if p.grad is not None) ** 0.5


def test_an_accumulation_with_clipping(training: Training) -> None:
    for _ in range(3):
        for _ in range(2):
            training.backward(0.5)
        training.scaler.unscale_(training.optimizer)
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        norm(training.model)
        training.finish()
    assert WATCH.found == []


def test_a_norm_that_is_unscaled_by_hand(training: Training) -> None:
    for _ in range(3):
        training.backward()
        norm(training.model) / training.scaler.get_scale()
        training.finish()
    assert WATCH.found == []


def total_norm(grads: list[Tensor], scale: Tensor) -> Tensor:
    return nn.utils.get_total_norm(grads) / scale


def norm_of_quotients(grads: list[Tensor], scale: Tensor) -> Tensor:
    return nn.utils.get_total_norm([grad.div(scale) for grad in grads])


def norm_of_foreach(grads: list[Tensor], scale: Tensor) -> Tensor:
    return torch.stack(torch._foreach_norm(torch._foreach_div(grads, scale))).norm()


@pytest.mark.parametrize("is_read", [False, True], ids=["kept", "read"])
@pytest.mark.parametrize("unscaled", [total_norm, norm_of_quotients, norm_of_foreach])
def test_a_norm_that_is_divided_by_the_scale_as_a_tensor(
    unscaled: Callable[[list[Tensor], Tensor], Tensor], is_read: bool, training: Training
) -> None:
    kept: list[Any] = []
    for _ in range(3):
        training.backward()
        scale = training.scaler._get_scale_async()
        found = unscaled([p.grad for p in training.model.parameters() if p.grad is not None], scale)
        kept.append(found.item() if is_read else found)
        training.finish()
    assert WATCH.found == []


def test_gradients_that_are_looked_at_for_infs(training: Training) -> None:
    for _ in range(3):
        training.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in training.model.parameters())
        assert all(p.grad is not None and torch.isfinite(p.grad.sum()) for p in training.model.parameters())
        training.finish()
    assert WATCH.found == []


def test_steps_that_are_dropped_on_purpose(training: Training) -> None:
    for step in range(4):
        training.backward()
        training.scaler.unscale_(training.optimizer)
        if step % 2:
            training.optimizer.zero_grad(set_to_none=step == 1)
            training.scaler.update()
            continue
        training.finish()
    assert WATCH.found == []


def test_a_schedule_of_epochs_after_a_skipped_step(training: Training) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
    for epoch in range(3):
        for step in range(3):
            training.backward(float("inf") if (epoch, step) == (1, 2) else 1.0)
            training.finish()
        schedule.step()
    assert WATCH.found == []


def test_a_schedule_that_waits_for_real_steps(training: Training) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
    for step in range(6):
        training.backward(float("inf") if step == 3 else 1.0)
        training.scaler.step(training.optimizer)
        training.scaler.step_scheduler(schedule)
        training.scaler.update()
        training.optimizer.zero_grad()
    assert WATCH.found == []


def test_a_loss_in_fp16_that_the_region_has_computed(training: Training) -> None:
    for _ in range(3):
        with castwise.autocast("cpu", dtype=torch.float16):
            loss = -training.model(torch.randn(4, 8)).mean()
        assert loss.dtype is torch.float16
        training.scaler.scale(loss / 2).backward()
        training.finish()
    assert WATCH.found == []


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(training: Training, use_reentrant: bool) -> None:
    for _ in range(3):
        with castwise.autocast("cpu", dtype=torch.float16):
            x = torch.randn(4, 8, requires_grad=True)
            out: Any = checkpoint(training.model, x, use_reentrant=use_reentrant)
            loss = nn.functional.mse_loss(out, torch.zeros(4, 1))
        training.scaler.scale(loss).backward()
        training.finish()
    assert WATCH.found == []


@pytest.mark.parametrize("save", [lambda scaler: scaler.state_dict(), pickle.dumps, copy.deepcopy])
@pytest.mark.parametrize("scaler_first", [True, False])
def test_a_whole_checkpoint(training: Training, save: Callable[[Any], object], scaler_first: bool) -> None:
    for _ in range(3):
        training.backward()
        training.finish()
        if scaler_first:
            save(training.scaler)
        training.optimizer.state_dict()
        if not scaler_first:
            save(training.scaler)
    WATCH._each("ending")
    assert WATCH.found == []


def test_a_second_scaler_that_goes_on_from_the_first(training: Training) -> None:
    for _ in range(3):
        training.backward()
        training.finish()
        state = training.scaler.state_dict()
        training.scaler = castwise.GradScaler("cpu")
        training.scaler.load_state_dict(state)
    assert WATCH.found == []


def test_a_guard_for_bf16(training: Training) -> None:
    training.scaler = castwise.GradScaler("cpu", schedule=castwise.schedules.Guard())
    for _ in range(4):
        with castwise.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(training.model(torch.randn(4, 8)), torch.zeros(4, 1))
        training.scaler.scale(loss).backward()
        norm(training.model)  # nothing is scaled
        training.finish()
    assert WATCH.found == []


def test_gradients_of_a_network_that_is_not_stepped(training: Training) -> None:
    critic = nn.Linear(1, 1)  # its gradients are never zeroed
    for _ in range(4):
        with castwise.autocast("cpu", dtype=torch.float16):
            loss = critic(training.model(torch.randn(4, 8))).float().mean()
        training.scaler.scale(loss).backward()
        training.finish()
    assert WATCH.found == []


def test_a_training_with_torchs_own_scaler(training: Training) -> None:
    """No observer sees that one; its optimizer's steps are seen all the same."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = training.model(torch.randn(4, 8)).float().mean()
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
    assert WATCH.found == []


def test_gradients_that_were_unscaled_and_then_dropped(training: Training) -> None:
    for _ in range(3):
        training.backward()
        training.scaler.unscale_(training.optimizer)
        training.optimizer.zero_grad()
        training.optimizer.step()
        training.scaler.update()
    assert WATCH.found == []


def test_checks_for_zeros_and_infs_by_norms(training: Training) -> None:
    for _ in range(3):
        training.backward()
        for parameter in training.model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            assert not gradient.abs().max().isinf()
            assert gradient.norm() > 0 or gradient.abs().sum() == 0
        training.finish()
    assert WATCH.found == []


def test_gradients_that_are_projected_on_each_other(training: Training) -> None:
    """What comes of it does not depend on the scale, but for the scale itself."""
    for _ in range(3):
        training.backward()
        for parameter in training.model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            other = gradient.flip(0)
            if (gradient * other).sum() < 0:
                parameter.grad = gradient - (gradient * other).sum() / (other * other).sum() * other
        training.finish()
    assert WATCH.found == []


def test_a_backward_that_begins_with_a_scaled_gradient(training: Training) -> None:
    """A pipeline by hand: the first half continues with what the second half has got."""
    first, second = training.model[0], training.model[2]
    for _ in range(3):
        with castwise.autocast("cpu", dtype=torch.float16):
            hidden = first(torch.randn(4, 8)).relu()
            cut = hidden.detach().requires_grad_()
            loss = second(cut).float().mean()
        training.scaler.scale(loss).backward()
        hidden.backward(cut.grad)
        training.finish()
    assert WATCH.found == []


def test_a_frozen_part_in_fp16_and_the_rest_in_fp32() -> None:
    backbone, head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    subscriber = Subscriber()
    WATCH.subscribe(subscriber.receive, of_gradients=True)
    for _ in range(3):
        with castwise.autocast("cpu", dtype=torch.float16):
            features = backbone(torch.randn(4, 8))
        head(features.float()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    WATCH.unsubscribe(subscriber.receive)
    assert WATCH.found == []


def test_an_optimizers_state_that_is_looked_at(training: Training) -> None:
    for _ in range(3):
        training.backward()
        training.finish()
        copy.deepcopy(training.optimizer.state_dict())
    WATCH._each("ending")
    assert WATCH.found == []


@pytest.mark.parametrize("how", [torch.jit.trace, torch.export.export])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_that_is_exported_after_its_training(how: Callable[..., Any], training: Training) -> None:
    with castwise.Monitor(training.model, training.optimizer, training.scaler):
        training.backward()
        training.finish()
        how(training.model.eval(), (torch.randn(4, 8),))
    assert WATCH.found == []


@pytest.mark.parametrize("keyword", [True, False])
@pytest.mark.parametrize("disabled", [True, False])
def test_a_validation_in_fp32_is_one_on_purpose_if_it_says_so(disabled: bool, keyword: bool) -> None:
    class Net(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # nn.Linear's
            return super().forward(input)

    model, x = Net(8, 1), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with castwise.Monitor(model, optimizer):
        for _ in range(2):
            with castwise.autocast("cpu", dtype=torch.bfloat16):
                loss = model.train()(x).mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad(), castwise.autocast("cpu", enabled=False) if disabled else contextlib.nullcontext():
                model.eval()(input=x) if keyword else model.eval()(x)
        found = [mistake.name for mistake in WATCH.found]
    assert found == ([] if disabled else ["validation-outside-autocast"])


def test_half_weights_are_named_before_the_scaler_refuses_their_gradients(training: Training) -> None:
    training.model.half()
    training.backward()
    with pytest.raises(ValueError, match="fp16"):
        training.finish()
    assert [mistake.name for mistake in WATCH.found] == ["half-with-autocast"]


def test_gradients_are_copied_and_saved_as_plain_tensors(training: Training) -> None:
    training.backward()
    gradients = [parameter.grad for parameter in training.model.parameters()]
    saved = io.BytesIO()
    torch.save(gradients, saved)
    saved.seek(0)
    for others in (
        copy.deepcopy(gradients),
        torch.load(saved, weights_only=True),
        pickle.loads(pickle.dumps(gradients)),
    ):
        assert {type(other) for other in others} == {torch.Tensor}
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True) if a is not None)


@pytest.mark.parametrize("every", [1, 100])
def test_a_monitored_model_is_copied_and_saved_without_its_hooks(every: int) -> None:
    training = Training()
    with castwise.Monitor(training.model, training.optimizer, training.scaler, every=every, on_nonfinite="diagnose"):
        training.backward()
        training.finish()
        saved = io.BytesIO()
        torch.save(training.model, saved)
        saved.seek(0)
        copies = [copy.deepcopy(training.model), torch.load(saved, weights_only=False)]
    x = torch.randn(4, 8)
    for model in copies:
        assert torch.equal(model(x), training.model(x))
    needs = {line for line in pickletools_names(saved.getvalue()) if "castwise" in line}
    assert needs == set()


def pickletools_names(saved: bytes) -> set[str]:
    """The names that a file of torch.save imports when it is loaded."""
    with zipfile.ZipFile(io.BytesIO(saved)) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("data.pkl")]
        return {str(argument) for _, argument, _ in pickletools.genops(archive.read(name)) if isinstance(argument, str)}


def test_gradients_are_plain_tensors_again_before_anybody_can_keep_one(training: Training) -> None:
    training.backward()
    kept = [parameter.grad for parameter in training.model.parameters()]
    copies = [gradient.detach().clone() for gradient in kept if gradient is not None]
    assert {type(gradient) for gradient in [*kept, *copies]} == {ScaledGradient}
    training.scaler.unscale_(training.optimizer)
    assert {type(gradient) for gradient in [*kept, *copies]} == {torch.Tensor}


def test_a_finder_that_fails_is_warned_of_and_the_training_goes_on(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("castwise._mistakes.accumulation.Accumulation.updating", lambda *_, **__: 1 / 0)
    training.backward()
    with pytest.warns(RuntimeWarning, match="check Accumulation failed and is turned off: ZeroDivisionError"):
        training.finish()


def backward_inside(training: Training) -> None:
    with castwise.autocast("cpu", dtype=torch.float16):
        training.scaler.scale(training.model(torch.randn(4, 8)).float().mean()).backward()


@pytest.mark.parametrize("mistake", ["backward-inside-autocast", "clipped-while-scaled"])
def test_a_monitor_finds_and_records_mistakes_by_itself(mistake: str) -> None:
    training, records = Training(), []
    is_of_gradients = mistake == "clipped-while-scaled"
    monitor = castwise.Monitor(training.model, training.optimizer, training.scaler, sinks=[records.append])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with castwise.installed() if is_of_gradients else contextlib.nullcontext(), monitor:
            for _ in range(3):
                training.backward() if is_of_gradients else backward_inside(training)
                nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
                training.finish()
    assert [record["name"] for record in records if record["kind"] == "mistake"] == [mistake]
    (warning,) = [each for each in warned if issubclass(each.category, MixedPrecisionMistake)]
    assert warning.filename == __file__
    assert OBSERVERS == []


def clip(training: Training) -> None:
    nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)


def measure(training: Training) -> None:
    norm(training.model)


def save(training: Training) -> None:
    torch.save({"optimizer": training.optimizer.state_dict()}, io.BytesIO())


def load(training: Training) -> None:
    low = nn.Linear(8, 1).bfloat16()
    high = torch.optim.AdamW(nn.Linear(8, 1).parameters())
    for param in high.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    high.step()
    torch.optim.AdamW(low.parameters()).load_state_dict(high.state_dict())


def draw_again(training: Training) -> None:
    checkpoint = torch.utils.checkpoint.checkpoint
    checkpoint(nn.Dropout(0.5), torch.ones(8), use_reentrant=False, preserve_rng_state=False)


@pytest.mark.parametrize("is_installed", [False, True])
@pytest.mark.parametrize(
    ("mistaken", "name"),
    [
        (clip, "clipped-while-scaled"),
        (measure, "measured-while-scaled"),
        (save, "scaler-not-saved"),
        (load, "state-narrowed"),
        (draw_again, "recomputed-at-random"),
    ],
)
@pytest.mark.filterwarnings("ignore::castwise.MixedPrecisionMistake")
def test_five_mistakes_are_found_only_while_castwise_is_installed(
    mistaken: Callable[[Training], None], name: str, is_installed: bool
) -> None:
    training = Training()
    monitor = castwise.Monitor(training.model, training.optimizer, training.scaler)
    with castwise.installed() if is_installed else contextlib.nullcontext(), monitor:
        for _ in range(2):
            training.backward()
            mistaken(training)
            training.finish()
        found = {mistake.name for mistake in WATCH.found}
    assert found == ({name} if is_installed else set())


@pytest.mark.parametrize("on_nonfinite", [None, "diagnose"])
@pytest.mark.parametrize("every", [1, 100])
def test_a_monitor_leaves_the_class_of_gradients_alone(every: int, on_nonfinite: Any) -> None:
    training = Training()

    def classes() -> set[type]:
        return {type(param.grad) for param in training.model.parameters()}

    attributes = [vars(torch), vars(torch.optim.lr_scheduler.LRScheduler), vars(torch.amp)]
    before = [dict(each) for each in attributes]
    with castwise.Monitor(training.model, training.optimizer, training.scaler, every=every, on_nonfinite=on_nonfinite):
        assert [dict(each) for each in attributes] == before  # nothing is patched
        for _ in range(3):
            training.backward()
            assert classes() == {torch.Tensor}
            training.scaler.unscale_(training.optimizer)
            assert classes() == {torch.Tensor}
            training.finish()
        # Also that of a monitor which outlives what has changed it.
        with castwise.installed():
            training.backward()
            assert classes() == {ScaledGradient}
        assert classes() == {torch.Tensor}
        training.finish()
        training.backward()
        assert classes() == {torch.Tensor}


def test_where_warnings_are_errors_the_training_goes_on() -> None:
    training, records = Training(), []
    monitor = castwise.Monitor(training.model, training.optimizer, training.scaler, sinks=[records.append])
    with warnings.catch_warnings(), monitor:
        warnings.simplefilter("error", MixedPrecisionMistake)
        for _ in range(2):
            backward_inside(training)
            training.finish()
    assert [record["name"] for record in records if record["kind"] == "mistake"] == ["backward-inside-autocast"]


def test_a_monitor_that_nobody_detaches_is_silent_at_the_end_of_the_process() -> None:
    script = """
import torch, castwise
model = torch.nn.Linear(2, 1)
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), castwise.GradScaler("cpu")
monitor = castwise.Monitor(model, optimizer, scaler).attach()
scaler.scale(model(torch.ones(2)).sum()).backward()
scaler.step(optimizer)
scaler.update()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
