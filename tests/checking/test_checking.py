"""Verdicts on programs that compute something else, the same in another way, or the same less precisely."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
import time
import warnings
from typing import Any

import pytest
import torch
from tests.checking.programs import program, train

from castwise.checking import CheckResult, Golden, NotReproducibleError, ProgramError, check, record
from castwise.checking._judging import changed_settings
from castwise.checking._measuring import Plan, measure_apart, of_all_ranks

DTYPES = {"fp32": {}, "bf16": {"dtype": torch.bfloat16}, "fp16": {"dtype": torch.float16, "scale": 64.0}}


@pytest.fixture(scope="module", params=DTYPES)
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def golden(precision: str) -> Golden:
    return record(program(**DTYPES[precision]), steps=2)


def verdict(golden: Golden, precision: str, **changes: Any) -> CheckResult:
    return check(program(**DTYPES[precision], **changes), golden)


def test_an_unchanged_program_is_identical(golden: Golden, precision: str) -> None:
    assert golden.dtype == {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision]
    found = verdict(golden, precision)
    assert (found.kind, found.exit_code) == ("identical", 0)


@pytest.mark.parametrize("changes", [{"fused": True}, {"foreach": False, "clips_by_hand": True}])
def test_a_rewrite_is_the_same_function(golden: Golden, precision: str, changes: dict[str, Any]) -> None:
    found = verdict(golden, precision, **changes)
    assert found.kind in ("same", "identical"), found
    assert found.exit_code == 0


CHANGES = {
    "blocks.1.norm, forward": [{"second": {"eps": 1e-6}}],
    "blocks.1, forward": [{"second": {"gelu": "tanh"}}, {"second": {"dropout": 0.11}}],
    "loss": [{"loss_bug": 1e-4}],
    "between backward and step": [{"clip": 0.5}],
    "optimizer": [{"lr": 1.001e-2}, {"betas": (0.9, 0.9991)}, {"weight_decay": 0.011}],
    "initial weight words.weight": [{"seed": 1}],
}


@pytest.mark.parametrize("where", CHANGES)
def test_another_function_is_found_and_named(golden: Golden, precision: str, where: str) -> None:
    for changes in CHANGES[where] if precision == "bf16" else CHANGES[where][:1]:
        found = verdict(golden, precision, **changes)
        assert (found.kind, found.where, found.exit_code) == ("different", where, 1), found
        assert found.accuracy is not None
        if "lr" in changes:
            assert found.verdict == "different function: optimizer, lr 0.01 is now 0.01001 (AdamW, step 1)"


def test_a_value_in_fewer_bits_is_less_accurate(golden: Golden, precision: str) -> None:
    """The fewer bits are those of bfloat16, which a program in bfloat16 has already."""
    found = verdict(golden, precision, second={"is_low": True})
    if precision == "bf16":
        assert found.exit_code == 0
        return
    assert (found.kind, found.where, found.exit_code) == ("less accurate", "blocks.1", 1), found
    assert found.accuracy is not None
    assert found.accuracy.ratio > found.accuracy.allowed
    assert found.verdict.startswith("same function, less accurate: blocks.1, ")


def test_a_constant_in_the_loss_decides_although_no_gradient_has_it() -> None:
    def program(constant: float = 0.0, scale: float = 1.0) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(model(torch.rand(5, 3)).square().mean() + constant).backward()
        scaler.step(optimizer)

    golden = record(program, 1)
    assert check(functools.partial(program, scale=8.0), golden).kind == "identical"
    found = check(functools.partial(program, 1e-3), golden)
    assert (found.kind, found.verdict) == ("different", "different function: loss, step 1")
    golden.losses = []  # as in older files
    found = check(functools.partial(program, 1e-3), golden)
    assert found.verdict == "identical: all gradients, weights and buffers have the same bits"


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_of_a_version_that_calls_no_backward_all_but_the_losses_is_compared(scale: float) -> None:
    def program(calls_backward: bool, rate: float = 0.1, scale: float = 1.0) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer, loss = torch.optim.SGD(model.parameters(), rate), model(torch.rand(5, 3)).square().mean() * scale
        if calls_backward:
            loss.backward()
        else:
            for param, grad in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
                param.grad = grad
        for param in model.parameters():
            param.grad /= scale
        optimizer.step()

    note = "losses are not compared, because only one of the two versions calls `backward`"
    golden = record(functools.partial(program, True), 1)
    found = check(functools.partial(program, False, scale=scale), golden)
    assert (found.kind, found.notes) == ("identical" if scale == 1.0 else "same", (note,))
    assert check(functools.partial(program, False, rate=0.2), golden).where == "optimizer"
    golden = record(functools.partial(program, False), 1)
    assert check(functools.partial(program, True, scale=scale), golden).notes == (note,)
    assert check(functools.partial(program, False), golden).notes == ()


def test_a_setting_decides_although_these_steps_do_not_show_it() -> None:
    def program(rate: Any = 0.1, momentum: float = 0.9) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum)
        model(torch.rand(5, 3)).square().mean().backward()
        optimizer.step()

    golden = record(program, 1)
    found = check(functools.partial(program, momentum=0.8), golden)
    said = "setting momentum 0.9 is now 0.8 (SGD, step 1), without effect in these steps"
    assert (found.kind, found.where, found.verdict) == ("different", "setting", f"different function: {said}")
    found = check(lambda: program(torch.tensor(0.1)), golden)  # the rate that float32 has
    assert (found.kind, found.notes[0]) == (
        "same",
        "setting without effect in these steps: lr 0.1 is now 0.10000000149011612 (SGD, step 1)",
    )


def test_all_models_are_compared_whichever_is_called_first_and_whichever_steps_first() -> None:
    def program(log: bool = False, rate: float = 0.1) -> None:
        torch.manual_seed(0)
        first, second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for model, lr in ((second, 0.1), (first, rate))]
        x = first(torch.rand(5, 3))
        (second(x).sigmoid().log() if log else torch.nn.functional.logsigmoid(second(x))).mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    golden = record(program, 1)
    assert {key.name for key in golden.errors} == {"weight", "bias", "Linear.weight", "Linear.bias", "loss"}
    found = check(functools.partial(program, log=True), golden)
    assert (found.kind, found.notes) == ("same", ())
    found = check(functools.partial(program, rate=0.2), golden)
    assert found.verdict == "different function: optimizer, lr 0.1 is now 0.2 (SGD, step 1)"
    golden.spreads[next(iter(golden.spreads))] = 0.5
    assert check(functools.partial(program, log=True), golden).notes == (
        "values whose recorded error is above 0.3, so that their accuracy is not compared: 1",
    )


class Masked(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(torch.ones_like(x).triu(1).bool(), -torch.inf)


def test_infs_that_a_module_returns_on_purpose_have_no_error() -> None:
    def program(halves: bool = False) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), Masked(), torch.nn.Softmax(-1))
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(4, 4)
        out = model(x)
        ((out.square().sum() / 3) if halves else (out / 3 * out).sum()).backward()
        optimizer.step()

    golden = record(program, 1)
    assert golden.local["1"] == 0.0
    assert check(functools.partial(program, halves=True), golden).kind == "same"


def test_a_program_whose_loss_is_not_finite_is_refused() -> None:
    """In later steps all would be NaN, and so the same as NaN."""
    with pytest.raises(ValueError, match="the loss in step 1 has an inf or NaN, also in float64: `castwise run` tells"):
        record(program(loss_bug=float("inf")), steps=1)


def test_a_batch_in_two_halves_is_the_same_function() -> None:
    golden = record(program(dropout=0.0), steps=2)
    found = check(program(dropout=0.0, halves=True), golden)
    assert found.kind == "same", found


def test_a_bug_in_the_loss_of_micro_batches_is_named_so() -> None:
    """The loss differs before the first backward, although the loss of the whole batch is known after the last."""
    golden = record(program(halves=True), 2)
    result = check(program(halves=True, loss_bug=0.01), golden)
    assert (result.kind, result.where) == ("different", "loss")


@pytest.mark.parametrize("halves", [False, True])
def test_a_gradient_that_is_changed_after_the_backward_is_told_from_a_wrong_one(halves: bool) -> None:
    def program(after: float = 1.0, wrong: float = 1.0) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[1].weight.register_hook(lambda grad: grad * wrong)
        for _ in range(2):
            optimizer.zero_grad()
            for part in torch.rand(4, 3).chunk(2 if halves else 1):
                (model(part).square().sum() / 4).backward()
            model[1].weight.grad.mul_(after)
            optimizer.step()

    golden = record(program, 2)
    assert check(program, golden).kind == "identical"
    assert check(functools.partial(program, after=1.1), golden).where == "between backward and step"
    assert check(functools.partial(program, wrong=1.1), golden).where == "1, weight gradient"


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.by, None


def test_of_wrong_weight_gradients_of_several_modules_the_first_is_named() -> None:
    def program(by: float = 1.0) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for layer in model[:2]:
            layer.forward = functools.partial(  # type: ignore[method-assign]
                lambda layer, x: torch.nn.functional.linear(x, Scaled.apply(layer.weight, by), layer.bias), layer
            )
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.rand(4, 4)).square().sum().backward()
            optimizer.step()

    assert check(functools.partial(program, by=1.1), record(program, 2)).where == "1, weight gradient"


def test_of_ranks_each_step_has_the_bits_of_all_that_take_it() -> None:
    assert of_all_ranks([["a"], ["b"]]) == ["a+b"]
    assert of_all_ranks([["a", "b"], []]) == ["a+", "b+"]


def test_ranks_that_do_not_end_at_a_signal_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castwise.checking._measuring.PATIENCE_S", 0.5)

    def program() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(2)  # until the other handles the signal
            raise ZeroDivisionError
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    began = time.monotonic()
    with pytest.raises(ProgramError, match="ZeroDivisionError"):
        measure_apart(program, Plan("plain", 1, ranks=2))
    assert time.monotonic() - began < 300


def test_a_value_of_the_program_decides() -> None:
    golden = record(lambda probe: train(logits=probe), steps=2)
    assert check(lambda probe: train(logits=probe), golden).kind == "identical"

    def changed(probe: Any) -> None:
        train(logits=lambda name, value: probe(name, value * (1 + 1e-6)))

    found = check(changed, golden)
    assert (found.kind, found.where, found.notes) == ("different", "value logits", ())
    golden.about["string_hash"] += 1
    (note,) = check(changed, golden).notes
    assert "set PYTHONHASHSEED=0" in note


@pytest.mark.parametrize("steps", [2, 5])
def test_a_value_after_the_last_step_decides(steps: int) -> None:
    """The model is evaluated after each step, and two steps are recorded of a program that takes two or more."""
    ends = []

    def trained(probe: Any, factor: float = 1.0) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                probe("evaluation", (1.0 if step == 0 else factor) * model(torch.ones(1, 3)))
        ends.append(step)

    golden = record(trained, 2)
    assert [key.step for key in golden.probes if key.kind == "value"] == [1, 2]
    assert check(trained, golden).kind == "identical"
    assert bool(ends) is (steps == 2)
    found = check(functools.partial(trained, factor=2.0), golden)
    assert (found.where, found.verdict) == ("value evaluation", "different function: value evaluation, after step 2")


def test_modules_that_write_to_their_buffers_can_run_again() -> None:
    """The backward of a batch normalization refuses statistics that were written to since its forward.

    A convolution refuses a bias of another dtype than its input. A `Sequential` inside runs once, as its modules.
    """

    def program(eps: float = 1e-5) -> None:
        torch.manual_seed(0)
        inner = torch.nn.Sequential(torch.nn.Tanh())
        model = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 1), torch.nn.BatchNorm1d(4, eps), inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.rand(5, 3, 2)).square().mean().backward()
            optimizer.step()

    golden = record(program, 2)
    assert golden.local.keys() == {"", "0", "1", "2.0"}
    assert check(program, golden).kind == "identical"
    assert check(functools.partial(program, 1e-4), golden).where == "1, forward"


def test_a_program_that_float64_stops_is_compared_with_the_recording() -> None:
    """So are programs on devices that have no float64."""

    def program(factor: float, asserts: bool = True) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(torch.rand(5, 64))
        if asserts and out.dtype != torch.float32:
            raise TypeError("the kernel takes float32")
        (factor * out).square().mean().backward()
        optimizer.step()

    golden = record(functools.partial(program, 1.0, asserts=False), 1)
    for factor, said in ((1 + 2**-23, "no more"), (1.01, "more")):
        found = check(functools.partial(program, factor), golden)
        assert found.verdict == "cannot tell: the program does not run in float64: the kernel takes float32"
        assert found.exit_code == 125
        assert found.notes == (f"compared with the recording in float64 instead: {said} than rounding explains",)
        assert found.accuracy is not None
        assert (found.accuracy.ratio > found.accuracy.allowed) is (said == "more")


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiled_code_is_checked_as_eager_code_and_that_is_said() -> None:
    def program(eps: float = 1e-5, compiles: bool = True) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4, eps))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = torch.compile(model, backend="aot_eager") if compiles else model
        run(torch.rand(5, 3)).square().mean().backward()
        optimizer.step()

    said = "compiled code ran as eager code in float64; its accuracy is that of the compiled code"
    golden = record(functools.partial(program, compiles=False), 1)
    found = check(functools.partial(program, 1e-4), golden)
    assert (found.where, found.notes) == ("1, forward", (said,))
    assert check(program, golden).exit_code == 0
    assert check(functools.partial(program, 1e-4, compiles=False), golden).notes == ()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("is_in_place", [False, True])
def test_the_compiled_block_that_rounds_more_than_its_eager_code_is_named(is_in_place: bool) -> None:
    def rounding(graph: Any, inputs: Any) -> Any:
        return lambda *args: [out.bfloat16().float() for out in graph(*args)]

    def program(compiled: int | None = None, factor: float = 1.0) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Block() for _ in range(2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, block in enumerate(model if compiled is not None else ()):
            backend = rounding if number == compiled else "eager"
            if is_in_place:
                block.compile(backend=backend)
            else:
                model[number] = torch.compile(block, backend=backend)
        for _ in range(2):
            optimizer.zero_grad()
            (factor * model(torch.rand(5, 4))).square().sum().backward()
            optimizer.step()

    golden = record(program, 2)
    assert check(functools.partial(program, 1), golden).verdict.startswith("same function, less accurate: 1, ")
    assert check(functools.partial(program, 2), golden).kind == "identical"
    assert check(functools.partial(program, 1, 1.1), golden).where == "loss"


def test_a_call_of_a_module_that_raises_is_left_out() -> None:
    def program(factor: float = 1.0) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
        with contextlib.suppress(RuntimeError):
            model(torch.ones(2, 5))
        (factor * model(torch.ones(2, 3))).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        golden = record(program, 1)
    assert set(golden.callers.values()) == {None, ""}
    assert check(functools.partial(program, 2.0), golden).where == "loss"


class Halves(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).chunk(2, -1)


def test_modules_under_vmap_and_outputs_without_a_gradient_are_left_out() -> None:
    def program(vmaps: bool = False, is_frozen: bool = False) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), Halves(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[0].bias.requires_grad_(not is_frozen)
        for _ in range(2):
            optimizer.zero_grad()
            half, _ = (torch.vmap(model) if vmaps else model)(torch.ones(2, 3))
            half.square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    golden = record(program, 2)
    assert check(functools.partial(program, vmaps=True), golden).kind in ("identical", "same")
    frozen = check(functools.partial(program, is_frozen=True), golden)
    assert (frozen.where, frozen.notes) == ("gradient 0.bias is missing", ("recorded values that are missing: 2",))


def test_of_another_optimizer_settings_without_a_counterpart_are_left_out() -> None:
    def settings(optimizer: str, **values: float) -> list[list[dict[str, Any]]]:
        return [[{"optimizer": optimizer, "group": 0, "params": ["weight"], "values": values}]]

    golden = Golden(1, "float32", {}, settings("SGD", lr=0.1, momentum=0.9))
    assert changed_settings(golden, settings("Adam", lr=0.2, eps=1e-8)) == {
        "optimizer SGD is now Adam": False,
        "lr 0.1 is now 0.2 (SGD, step 1)": False,
    }
    assert changed_settings(golden, settings("SGD", lr=0.1)) == {"momentum 0.9 is now not set (SGD, step 1)": False}


def test_losses_of_two_optimizers_in_turn_are_compared_one_by_one() -> None:
    def program(detaches: bool = True) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[2], model[0])]
        for _ in range(2):
            hidden = model[1](model[0](torch.rand(5, 3)))
            model[2](hidden.detach() if detaches else hidden).square().mean().backward(retain_graph=True)
            optimizers[0].step()
            model[2](hidden).mean().backward()
            optimizers[1].step()

    golden = record(program, 2)
    assert [key[:4] for key in golden.probes if key.kind == "loss"] == [
        (0, "loss", "loss", 0),
        (1, "loss", "loss", 0),
        (1, "loss", "loss", 1),
    ]
    assert (
        check(functools.partial(program, detaches=False), golden).verdict == "different function: 1, backward, step 1"
    )


def test_a_function_without_an_optimizer_is_checked_by_its_values() -> None:
    def attention(probe: Any, *, causal: bool = True) -> None:
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 2, 8, 4)
        probe("out", torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal))

    golden = record(attention, steps=1)
    assert check(attention, golden).kind == "identical"
    assert check(lambda probe: attention(probe, causal=False), golden).where == "value out"


def test_a_program_without_seeds_is_refused() -> None:
    calls = []

    def unseeded() -> None:
        calls.append(1)
        train(seed=len(calls))

    with pytest.raises(NotReproducibleError, match=r"two runs of the program differ in float64, by up to .*: build"):
        record(unseeded, steps=1)


def test_a_program_that_stops_being_reproducible_cannot_be_told() -> None:
    golden, calls = record(program(), steps=1), []

    def unseeded() -> None:
        calls.append(1)
        train(seed=len(calls))

    found = check(unseeded, golden)
    assert (found.kind, found.exit_code) == ("cannot tell", 125)
    assert "fix its seeds" in found.verdict


def test_a_program_without_enough_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="the program took 2 optimizer steps of 3: record fewer steps"):
        record(program(), steps=3)
    with pytest.raises(ValueError, match="took 0 optimizer steps of 1: processes that it starts itself are not seen"):
        record(lambda: None, steps=1)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        record(program(), steps=0)
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        record(program(), steps=1, ranks=0)


def test_fewer_steps_than_recorded_cannot_be_told() -> None:
    golden = record(program(), steps=2)
    found = check(program(steps=1), golden)
    assert (found.kind, found.verdict) == (
        "cannot tell",
        "cannot tell: the program took 1 optimizer steps, and 2 were recorded",
    )


def test_a_loss_that_is_less_accurate_is_named_and_not_what_follows_from_it() -> None:
    def program(dtype: torch.dtype = torch.float32, of_step: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.rand(5, 3)).to(dtype).float().square().mean().backward()
            for param in model.parameters():
                param.grad = param.grad.to(of_step).float()
            optimizer.step()

    golden = record(program, 2)
    found = check(functools.partial(program, torch.bfloat16), golden)
    assert found.verdict.startswith("same function, less accurate: loss, step 1, ")
    found = check(functools.partial(program, of_step=torch.bfloat16), golden)
    assert found.kind == "less accurate"
    assert "loss" not in found.verdict


def test_steps_that_a_scaler_skips_are_told_apart_from_a_short_program() -> None:
    golden = record(program(**DTYPES["fp16"]), steps=2)
    found = check(program(dtype=torch.float16, scale=2.0**60), golden)
    assert found.verdict == (
        "cannot tell: the program took 0 optimizer steps, and 2 were recorded; its scaler skipped 2: "
        "lower its initial scale"
    )


def test_a_check_of_accuracy_ends_when_all_modules_have_run_again() -> None:
    ends: list[str] = []

    def counted(**switches: Any) -> None:
        ends.append("forward")
        train(**switches, logits=lambda *_: ends.append("backward"))

    golden = record(functools.partial(counted, dropout=0.0), steps=2)
    ends.clear()
    assert check(functools.partial(counted, dropout=0.0, halves=True), golden).kind == "same"
    runs = " ".join(ends).split("forward")[1:]
    assert [run.split() for run in runs] == [["backward"] * 2, ["backward"] * 2, []]


def test_a_probe_takes_tensors() -> None:
    with pytest.raises(TypeError, match=r"probe\('x', value\) takes a tensor, got a float"):
        record(lambda probe: probe("x", 1.0), steps=1)


def test_checking_leaves_the_process_as_it_was() -> None:
    models: list[torch.nn.Module] = []

    def failing(probe: Any) -> None:
        models.append(torch.nn.Linear(2, 2))
        models[-1](torch.ones(1, 2)).sum().backward()
        probe("x", torch.ones(1) if torch.get_default_dtype() == torch.float32 else 1.0)

    torch.manual_seed(5)
    before = torch.get_rng_state()
    backward, step = torch.autograd.backward, torch.amp.GradScaler.step
    golden = record(program(), steps=1)
    check(program(lr=1.0), golden)
    with pytest.raises(TypeError):
        record(failing, steps=1)
    assert [len(model.weight._post_accumulate_grad_hooks or ()) for model in models] == [0, 0]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.autograd.backward is backward
    assert torch.amp.GradScaler.step is step
    assert torch.get_default_dtype() == torch.float32
    assert not torch.nn.modules.module._global_forward_hooks


def test_an_average_of_weights_decides() -> None:
    """No optimizer has it, and no loss shows it."""

    def program(decay: float = 0.9, *, lerps: bool = False) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 4)
        average = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.rand(5, 3)).square().mean().backward()
            optimizer.step()
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                if lerps:
                    old.data.lerp_(new.data, 1 - decay)
                else:
                    old.data.mul_(decay).add_(new.data, alpha=1 - decay)

    golden = record(program)
    assert check(program, golden).kind == "identical"
    assert check(functools.partial(program, lerps=True), golden).kind == "same"
    assert check(functools.partial(program, 0.99), golden).verdict == "different function: buffer Linear.weight, step 2"
    assert "is missing" in check(functools.partial(program, 1.0), golden).verdict


def test_where_frozen_weights_constants_and_groups_stand_is_no_difference() -> None:
    def program(change: str = "", lr: float = 0.1) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model[0].requires_grad_(change == "trains all")
        mask = torch.ones(4, 4).tril()
        if change != "no buffer":
            model.register_buffer("mask", mask)
        groups = [{"params": [*model[i].parameters()], "lr": lr * i} for i in (1, 2)]
        if change != "no frozen weights":
            groups[0]["params"] = [*model[0].parameters(), *groups[0]["params"]]
        optimizer = torch.optim.SGD(groups[:: -1 if change == "groups" else 1], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.rand(5, 3)) @ mask).square().mean().backward()
            optimizer.step()
            optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})

    golden, fewer = record(program, 2), record(functools.partial(program, "no frozen weights"), 2)
    for change in ("no frozen weights", "no buffer", "groups"):
        assert check(functools.partial(program, change), golden).kind == "same", change
    assert check(program, fewer).kind == "same"
    assert check(functools.partial(program, "trains all"), golden).kind == "different"
    assert check(functools.partial(program, lr=0.2), golden).where == "optimizer"


@pytest.mark.parametrize("compiled", ["whole step", "optimizer"])
def test_steps_may_be_compiled(compiled: str) -> None:
    """Dynamo follows what it compiles into the hooks of an optimizer, and failed there."""

    def program(what: str = compiled, lr: float = 0.1) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        take = torch.compile(optimizer.step, backend="eager") if what == "optimizer" else optimizer.step

        def step(batch: torch.Tensor) -> None:
            model(batch).square().mean().backward()
            take()
            optimizer.zero_grad()

        run = torch.compile(step, backend="eager") if what == "whole step" else step
        for _ in range(2):
            run(torch.rand(5, 3))

    golden = record(functools.partial(program, "nothing"), 2)
    assert check(program, golden).kind == "identical"
    assert check(functools.partial(program, lr=0.2), golden).where == "optimizer"


def test_a_model_that_averages_its_own_weights_may_run_again() -> None:
    """Its forward gives weights other data, which must not be those of a run in float64."""

    class Momentum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
            self.key.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for old, new in zip(self.key.parameters(), self.query.parameters(), strict=True):
                old.data = old.data * 0.9 + new.data * 0.1
            return self.query(x) - self.key(x)

    def program(optimizes_all: bool = False, lr: float = 0.1) -> None:
        torch.manual_seed(0)
        model = Momentum()
        optimizer = torch.optim.SGD((model if optimizes_all else model.query).parameters(), lr=lr)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.rand(5, 3)).square().mean().backward()
            optimizer.step()

    golden = record(program, 2)
    assert golden.local.keys() == {"", "query", "key"}
    assert check(functools.partial(program, optimizes_all=True), golden).kind == "same"
    assert check(functools.partial(program, lr=0.2), golden).where == "optimizer"
