"""`Recording`: a step is diagnosed after it was taken, from what its forwards were given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import GradScaler, Monitor, Policy
from castwise.amp import Cause
from castwise.diagnosis._backward_calls import BACKWARD_CALLS
from castwise.diagnosis._loss_code import LOSS_CODE
from castwise.diagnosis._recording import GRADIENTS_OF, MOST, Recording


class Calls(nn.Module):
    """A model whose module "inner" calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()

        class Inner(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return function(x)

        self.first, self.inner, self.last = nn.Linear(4, 4), Inner(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return {"logits": [self.last(self.inner(self.first(x)))], "count": torch.tensor(len(x))}


@pytest.fixture
def record() -> Iterator[Callable[[nn.Module], Recording]]:
    made: list[Recording] = []

    def attached(model: nn.Module) -> Recording:
        made.append(Recording(model))
        made[-1].attach()
        return made[-1]

    yield attached
    for recording in made:
        recording.detach()


def step(model: nn.Module, scale: float = 1.0, x: Tensor | None = None) -> None:
    logits = model(torch.ones(2, 4) if x is None else x)["logits"][0]
    (logits.float().sum() * scale).backward()


def test_a_fault_of_the_forward(record: Any) -> None:
    model = Calls(lambda x: x / 0)
    recording = record(model)
    step(model)
    found = recording.take().diagnose(1.0)
    assert (found.phase, found.module, found.op) == ("forward", "inner", "aten.div")


def test_batches_inside_transforms_of_torch_func_are_not_kept(record: Any, recwarn: pytest.WarningsRecorder) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    recording = record(model)

    def loss(params: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, params, (sample,)).square().mean()

    vmap(grad(loss), (None, 0))({name: param.detach() for name, param in model.named_parameters()}, x)
    assert len(recording.take()) == 0
    assert list(recwarn) == []
    loss(dict(model.named_parameters()), x).backward()
    assert len(recording.take()) == 1


def test_a_nan_that_a_mean_passes_on_with_finite_gradients(record: Any) -> None:
    class LogDensity(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return torch.log(-super().forward(input).square() - 1)  # whose gradient is finite

    model = LogDensity(4, 4)
    recording = record(model)
    model(torch.ones(2, 4)).mean().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.isfinite().all()
    found = recording.take().diagnose(1.0, Cause.NONFINITE_LOSS)
    assert (found.phase, found.op) == ("forward", "aten.log")


def test_of_nothing_there_is_no_diagnosis(record: Any) -> None:
    assert record(Calls()).take().diagnose(1.0) is None


def test_a_forward_without_a_backward(record: Any) -> None:
    model = Calls(lambda x: x / 0)
    recording = record(model)
    model(torch.ones(2, 4))
    assert recording.take().diagnose(1.0).module == "inner"


def test_a_gradient_that_overflows_at_this_scale(record: Any) -> None:
    model = Calls(lambda x: x * 100)
    nn.init.constant_(model.last.weight, 1.0)
    for param in model.first.parameters():
        nn.init.constant_(param, 1e-3)
    recording = record(model)
    for exponent in (2, 10):  # 4 * 100 * 2^10 is more than fp16 holds
        with castwise.autocast("cpu", dtype=torch.float16):
            logits = model(torch.ones(2, 4))["logits"][0]
        (logits.float().sum() * 2.0**exponent).backward()
        found = recording.take().diagnose(2.0**exponent)
        if exponent == 2:
            assert not found
    assert (found.phase, found.module, found.op, found.remedy) == ("backward", "inner", "aten.mul", "scale")


def test_a_gradient_that_overflows_where_the_loss_begins(record: Any) -> None:
    model = Calls()
    recording = record(model)
    with castwise.autocast("cpu", dtype=torch.float16):
        logits = model(torch.ones(2, 4))["logits"][0]
    (logits.float().sum() * 2.0**20).backward()
    found = recording.take().diagnose(2.0**20)
    assert (found.phase, found.module, found.value) == ("loss", "", "inf")
    assert "or lower the scale" in found.advice


def test_a_fault_of_the_loss(record: Any) -> None:
    model = Calls()
    recording = record(model)
    (model(torch.ones(2, 4))["logits"][0].sum() * torch.nan).backward()
    found = recording.take().diagnose(1.0)
    assert (found.phase, found.module, found.op, found.value) == ("loss", "", "aten.mul", "nan")


def test_a_gradient_of_the_output_that_overflows_of_a_finite_loss_asks_for_a_lower_scale() -> None:
    model = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=2.0**17)
    with Monitor(model, optimizer, scaler, on_nonfinite="diagnose") as monitor:
        with castwise.autocast("cpu", dtype=torch.float16):
            loss = model(torch.ones(2, 4)).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    found = monitor.diagnosis
    assert found is not None
    assert (found.phase, found.value, found.remedy, found.scale) == ("loss", "inf", "scale", 2.0**17)
    assert str(found).startswith("loss: the gradient of the model's output is inf")
    overflowed = "the gradient of the model's output overflowed at scale 2^17 with a finite loss: lower the scale"
    assert found.advice.startswith(overflowed)


def test_a_mask_among_outputs_is_not_to_blame_for_the_scale(record: Any) -> None:
    model = nn.Linear(4, 4)
    masked = torch.eye(2, 4) > 0
    model.register_forward_hook(lambda _model, _args, output: output.masked_fill(masked, -torch.inf))
    recording = record(model)
    with castwise.autocast("cpu", dtype=torch.float16):
        logits = model(torch.ones(2, 4))
    (logits[~masked].float().sum() * 2.0**17).backward()
    found = recording.take().diagnose(2.0**17, Cause.OVERFLOW)
    assert (found.phase, found.op, found.remedy) == ("loss", "", "scale")


def test_a_finite_loss_whose_own_gradient_is_not_is_no_fault_of_the_scale(record: Any) -> None:
    model = Calls()
    nn.init.zeros_(model.last.weight)
    nn.init.zeros_(model.last.bias)
    recording = record(model)
    (model(torch.ones(2, 4))["logits"][0].sqrt().sum() * 2.0**10).backward()
    found = recording.take().diagnose(2.0**10, Cause.OVERFLOW)
    assert (found.phase, found.remedy) == ("loss", "code")
    assert (found.op, found.advice) == (
        "aten.sqrt",
        "the gradient of sqrt at 0 is inf: add an epsilon inside, (x + 1e-8).sqrt()",
    )


def test_a_loss_that_is_not_finite_of_outputs_that_are_is_the_loss_functions(record: Any) -> None:
    model = Calls()
    recording = record(model)
    (model(torch.ones(2, 4))["logits"][0].sum() * torch.nan).backward()
    found = recording.take().diagnose(2.0**16, Cause.NONFINITE_LOSS)
    assert (found.phase, found.in_loss, found.op) == ("loss", True, "aten.mul")


class WithLoss(nn.Module):
    """Returns its loss, and with it what that was computed from, as models of transformers do."""

    def __init__(self, wraps: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.wraps = nn.Linear(4, 4), nn.Linear(4, 3), wraps

    def forward(self, x: Tensor) -> Any:
        logits = self.head(self.first(x))
        return self.wraps(F.cross_entropy(logits.float(), torch.zeros(6).long(), reduction="sum"), logits)


@pytest.mark.parametrize("exponent", [13, 14, 16, 17])
def test_what_a_loss_among_the_outputs_is_computed_from_is_not_counted_twice(record: Any, exponent: int) -> None:
    found = []
    for wraps in (lambda loss, _: (loss,), lambda loss, logits: (loss, logits), lambda loss, y: (loss, y, [y, loss])):
        model = WithLoss(wraps)
        recording = record(model)
        with castwise.autocast("cpu", dtype=torch.float16):
            loss = model(torch.full((6, 4), 3.0))[0]
        (loss * 2.0**exponent).backward()
        found.append(recording.take().diagnose(2.0**exponent, Cause.OVERFLOW))
    assert found[0].remedy == "scale"
    assert found[0].module == ("head" if exponent < 17 else "")
    assert found[0] == found[1] == found[2]


def test_what_comes_to_outputs_from_outside_is_counted_as_well(record: Any) -> None:
    gradients: list[Tensor] = []
    model = WithLoss(lambda loss, logits: {"loss": loss, "logits": logits, "mask": torch.ones(3)})
    # A replay calls no hooks of the module's backward.
    model.first.register_forward_hook(lambda *given: given[2].register_hook(gradients.append) and None)
    recording = record(model)
    output = model(torch.ones(6, 4))
    (output["loss"] + 5 * output["logits"].square().sum()).backward()
    assert not recording.take().diagnose(1.0)
    assert len(gradients) == 2
    assert torch.equal(gradients[0], gradients[1])


def test_weights_that_a_model_returns_keep_no_hooks(record: Any) -> None:
    class WithTemperature(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.bias

    model = WithTemperature(4, 4)
    recording = record(model)
    output, bias = model(torch.ones(2, 4))
    (output * bias.exp()).sum().backward()
    assert not recording.take().diagnose(1.0)
    assert not model.bias._backward_hooks


@dataclass
class Output:
    logits: Any


class Plain:
    def __init__(self, logits: Any) -> None:
        self.logits = logits


@pytest.mark.parametrize("wraps", [Output, Plain, lambda y: SimpleNamespace(logits=y)])
def test_outputs_in_objects_are_seen(record: Any, wraps: Any) -> None:
    model = Calls(lambda x: x / 0)
    model.register_forward_hook(lambda _model, _args, output: wraps(output["logits"][0]))
    recording = record(model)
    model(torch.ones(2, 4)).logits.sum().backward()
    assert recording.take().diagnose(1.0).module == "inner"


def test_nothing_is_called_clean_of_which_no_backward_could_be_replayed(record: Any) -> None:
    model = Calls()
    model.register_forward_hook(lambda _model, _args, output: Output(Plain(output["logits"][0])))
    recording = record(model)
    (model(torch.ones(2, 4)).logits.logits.sum() * torch.inf).backward()
    assert recording.take().diagnose(1.0).op == "aten.mul"  # in the graph of the loss


@pytest.mark.parametrize("cause", [None, Cause.NONFINITE_LOSS])
def test_of_several_forwards_in_one_loss_the_one_at_fault_is_found(record: Any, cause: Cause | None) -> None:
    model = nn.Linear(4, 1)
    recording = record(model)
    bad = torch.ones(3, 4)
    bad[1, 2] = torch.nan
    (model(torch.ones(3, 4)) - model(bad)).square().mean().backward()
    found = recording.take().diagnose(1.0, cause)
    assert (found.phase, found.argument, found.index) == ("input", "0", (1, 2))


def test_outputs_that_are_masked_are_no_fault(record: Any) -> None:
    model = Calls()
    recording = record(model)
    masked = torch.eye(2, 4) > 0
    model.register_forward_hook(
        lambda _model, _args, output: {"x": output["logits"][0].masked_fill(masked, -torch.inf)}
    )
    model(torch.ones(2, 4))["x"].softmax(-1)[:, 0].sum().backward()
    assert not recording.take().diagnose(1.0)


def test_the_micro_batch_at_fault_is_found_with_its_random_numbers(record: Any) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    drawn: list[float] = []

    def noise(x: Tensor) -> Tensor:
        drawn.append(torch.rand(1).item())
        return x / 0 if drawn[-1] == expected[1] else x

    model = Calls(noise)
    recording = record(model)
    torch.manual_seed(0)
    for _ in range(3):
        step(model)
    state = torch.get_rng_state()
    assert recording.take().diagnose(1.0).module == "inner"
    assert drawn[:5] == expected + expected[:2]
    assert set(drawn[5:]) == {expected[1]}  # trials of the same micro-batch
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["torch", "castwise", "policy", "region in a policy", "none"])
def test_the_regions_of_the_forward_are_those_of_the_replay(record: Any, kind: str) -> None:
    seen: list[Any] = []

    def function(x: Tensor) -> Tensor:
        seen.append((x.dtype, (x @ x.T).dtype, x.softmax(-1).dtype, torch.is_autocast_enabled("cpu")))
        return x

    model = Calls(function)
    policy = Policy("float16", modules={"inner": "bfloat16"}, ops={"softmax": "float32"}).bind(model)
    recording = record(model)
    if kind == "none":
        step(model)
    elif kind == "policy":
        with castwise.autocast("cpu", policy=policy):
            step(model)
    elif kind == "region in a policy":
        with castwise.autocast("cpu", policy=policy), torch.autocast("cpu", dtype=torch.bfloat16):
            step(model)
    else:
        with (torch if kind == "torch" else castwise).autocast("cpu", dtype=torch.bfloat16):
            step(model)
    assert not recording.take().diagnose(1.0)
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert not torch.is_autocast_enabled("cpu")


def test_only_the_forwards_of_training_are_recorded(record: Any) -> None:
    inner = Calls()
    recording = record(inner)

    def logits(x: Tensor) -> Tensor:
        return inner(x)["logits"][0]  # type: ignore[no-any-return]

    checkpoint(logits, torch.ones(2, 4), use_reentrant=False).sum().backward()  # type: ignore[union-attr]
    with torch.no_grad():
        inner(torch.ones(2, 4))
    with pytest.raises(RuntimeError):
        inner(torch.ones(2, 5))
    taken = recording.take()
    taken.diagnose(1.0)
    assert (len(taken), len(recording.take())) == (1, 0)


def test_old_steps_are_not_kept_alive(record: Any) -> None:
    model = Calls()
    recording = record(model)

    def one() -> Any:
        before = nn.Linear(4, 4)
        step(model, x=before(torch.ones(2, 4)))
        return weakref.ref(before.weight)

    weight = one()
    gc.collect()
    assert weight() is None  # the graph that leads to the input is gone while the step is recorded
    recording.take()
    for _ in range(MOST + 10):
        step(model)
    assert len(recording.take()) == MOST
    assert len(recording.take()) == 0


def test_a_batch_without_a_backward_has_no_part_in_the_step(record: Any) -> None:
    model = Calls()
    recording = record(model)
    model(torch.full((2, 4), torch.nan))  # the training looks at its loss, and continues with another batch
    step(model)
    assert not recording.take().diagnose(1.0)


def test_what_an_iteration_of_the_scaler_leaves_is_forgotten_in_the_next() -> None:
    model, iteration = Calls(), [1]
    recording = Recording(model, lambda: iteration[0])
    recording.attach()
    step(model, x=torch.full((2, 4), torch.nan))
    iteration[0] = 2
    BACKWARD_CALLS.updating(None, is_set=False)
    step(model)
    taken = recording.take()
    recording.detach()
    assert len(taken) == 1
    assert not taken.diagnose(1.0)


def alive(shape: tuple[int, ...]) -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) and each.shape == shape for each in gc.get_objects())


def test_of_a_compiled_model_an_output_may_have_no_part_in_the_loss(record: Any, recwarn: Any) -> None:
    class WithLoss(Calls):
        def forward(self, x: Tensor) -> Any:
            logits = self.first(x)
            return logits, (self.inner(logits) / 0).sum()

    model = WithLoss()
    recording = record(model)
    _, loss = torch.compile(model, backend="aot_eager")(torch.ones(2, 4))
    loss.backward()
    found = recording.take().diagnose(1.0)
    assert found.op == "aten.div"
    assert [each for each in recwarn if "monitor" in str(each.message)] == []


@pytest.mark.parametrize("at_once", [False, True], ids=["each its own backward", "one backward for all"])
def test_gradients_of_outputs_are_kept_of_the_last_batches_only(record: Any, at_once: bool) -> None:
    model, x = nn.Linear(4, 37), torch.ones(2, 4)
    record(model)
    losses = [model(x).square().sum() for _ in range(3 * GRADIENTS_OF)]
    for together in [losses] if at_once else [[loss] for loss in losses]:
        sum(together).backward()  # type: ignore[union-attr]
    del losses, together
    LOSS_CODE.step_ends()  # which keeps outputs and what the losses have saved
    assert alive((2, 37)) == GRADIENTS_OF


@pytest.mark.parametrize("at_once", [False, True], ids=["each its own backward", "one backward for all"])
@pytest.mark.parametrize(("bad", "phase"), [("loss", "loss"), ("input", "input"), ("", None)])
def test_an_old_batch_is_replayed_if_its_loss_was_not_finite(
    record: Any, bad: str, phase: str | None, at_once: bool
) -> None:
    model = Calls()
    recording = record(model)
    losses = []
    for number in range(GRADIENTS_OF + 2):
        is_bad = number == 1
        x = torch.full((2, 4), torch.inf) if is_bad and bad == "input" else torch.ones(2, 4)
        losses.append(model(x)["logits"][0].sum() * (torch.inf if is_bad and bad == "loss" else 1.0))
        if not at_once:
            losses.pop().square().backward()
    if at_once:
        sum(loss.square() for loss in losses).backward()  # type: ignore[union-attr]
    found = recording.take().diagnose(1.0)
    assert (None if found is None else found.phase) == phase


def test_what_is_taken_is_diagnosed_once(record: Any) -> None:
    calls: list[int] = []
    model = Calls(lambda x: (calls.append(0), x / 0)[1])  # type: ignore[func-returns-value]
    recording = record(model)
    step(model)
    taken = recording.take()
    diagnosis, forwards = taken.diagnose(1.0), len(calls)
    assert diagnosis is taken.diagnose(1.0) is not None
    assert len(calls) == forwards


def test_a_recording_that_fails_does_not_end_the_training(record: Any) -> None:
    class Undetachable(Tensor):
        def detach(self) -> Tensor:
            raise OSError("not this one")

    model = Calls()
    recording = record(model)
    model.register_forward_pre_hook(lambda _model, args: args[:1])
    message = "the monitor skipped a measurement that failed: OSError: not this one"
    with pytest.warns(RuntimeWarning, match=message):
        model(torch.ones(2, 4), torch.ones(1).as_subclass(Undetachable))
    assert len(recording.take()) == 0


def test_what_is_taken_can_be_diagnosed_later(record: Any) -> None:
    is_bad = [False]
    model = Calls(lambda x: x / 0 if is_bad[0] else x)
    recording = record(model)
    step(model)
    first = recording.take()
    step(model, x=torch.full((2, 4), torch.nan))
    assert not first.diagnose(1.0)
    assert recording.take().diagnose(1.0).phase == "input"


def test_detached_it_leaves_nothing_behind() -> None:
    model = Calls()
    recording = Recording(model)
    recording.attach()
    recording.attach()
    step(model)
    recording.detach()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert len(recording.take()) == 0
