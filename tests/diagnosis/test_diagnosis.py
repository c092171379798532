"""`diagnose`: which module and op made the first inf or NaN, what reaches nothing, and that nothing is changed."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from tests.monitor.mixture import with_multiplied_gradient
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import GradScaler, Policy
from castwise.diagnosis import Diagnosis, diagnose
from castwise.diagnosis._recording import Recording
from castwise.monitor._records import DiagnosisRecord

INF, NAN = float("inf"), float("nan")
ONES = torch.ones(2, 4)


class Calls(nn.Module):
    """A model whose one module, "inner", calls a function, between layers with weights."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()

        class Inner(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return function(x)

        self.first, self.inner, self.last = nn.Linear(4, 4), Inner(), nn.Linear(4, 4)
        for layer in (self.first, self.last):
            nn.init.constant_(layer.weight, 0.1)
            nn.init.constant_(layer.bias, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))  # type: ignore[no-any-return]


def mean(output: Tensor) -> Tensor:
    return output.float().mean()


def of(function: Callable[[Tensor], Tensor], x: Tensor = ONES, loss_fn: Any = mean, scale: float = 1.0) -> Diagnosis:
    return diagnose(Calls(function), loss_fn, x, GradScaler("cpu", init_scale=scale))


# -- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "op", "value"),
    [
        (lambda x: (x - x).log(), "aten.log", "inf"),
        (lambda x: (x - x) / (x - x), "aten.div", "nan"),
        (lambda x: (x - 9).sqrt(), "aten.sqrt", "nan"),
        (lambda x: (1000 * x).exp() * 0, "aten.exp", "inf"),  # the NaN of 0 * inf comes later
        (lambda x: (x - x).log_() - 1, "aten.log_", "inf"),
        (lambda x: torch.div(x.detach(), 0, out=torch.empty(2, 4)) + x, "aten.div", "inf"),
        (lambda x: x.masked_fill(x > -9, -INF).softmax(-1), "aten.softmax", "nan"),
        (lambda x: x.masked_fill(x > -9, -INF), "aten.masked_fill", "inf"),
        (lambda x: torch.linalg.vector_norm(x * 0, dim=-1, keepdim=True).reciprocal() * x, "aten.reciprocal", "inf"),
        (lambda x: torch.stack([x, (x - x).log()]).chunk(2)[1][0] * 2, "aten.log", "inf"),
    ],
)  # fmt: skip
def test_the_op_and_its_module_are_named(function: Any, op: str, value: str) -> None:
    found = of(function)
    assert (found.found, found.phase, found.module, found.op, found.value) == (True, "forward", "inner", op, value)
    assert f"forward: inner: {op} gives {value}" in str(found)


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (
            lambda x: x.masked_fill(torch.eye(2, 4).bool() | (x[:, :1] > -9), -INF).softmax(-1),
            "check for rows that are -inf",
        ),
        (lambda x: x / (x - x[:, :1]), "check for divisors that are 0, and add an epsilon"),
        (lambda x: (x - x).log(), "check for inputs that are 0 or negative"),
        (lambda x: (x - x).rsqrt(), "check for inputs that are 0 or negative"),
        (lambda x: torch.linalg.vector_norm(x * 0).reciprocal() * x, "check for inputs that are 0, and add an epsilon"),
        (lambda x: (x * 1e30).exp() / 2, "clamp the exponent"),
        (lambda x: (-x * 1e30 - 1).sqrt(), "check for inputs that are negative"),
        (lambda x: torch.acos(2 + x * 0), "check for inputs outside the function's domain"),
        (lambda x: x[:1].std(0) + x, "the std of a single value divides by 0"),
        (lambda x: x[:0].mean() + x, "it is the mean of no elements"),
        (lambda x: (x * 1e30) * (x * 1e30), "no format holds the result of such large inputs"),
        (lambda x: torch.lgamma(x * 0), "check the ranges of its inputs"),
    ],
)
def test_a_remedy_names_what_usually_makes_the_value(function: Any, advice: str) -> None:
    found = of(function)
    assert found.remedy == "code"
    assert f"this op is not finite in fp32 either: {advice}" in str(found)


def test_ranges_of_inputs_and_results_are_those_of_the_op() -> None:
    x = torch.tensor([[-3.0, 1.0, 0.0, 2.0]])
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))

    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.log()

    model[0] = Log()
    found = diagnose(model, mean, (x,))
    given, made = found.inputs[0], found.outputs[0]
    assert (given.dtype, given.shape, given.lowest, given.highest, given.largest) == ("float32", (1, 4), -3, 2, 3)
    assert (given.nan, given.inf, given.nonfinite) == (0, 0, 0)
    assert (made.nan, made.inf, made.nonfinite) == (1, 1, 2)
    assert (made.lowest, made.highest) == (0, pytest.approx(math.log(2)))
    assert "input 0: float32 (1, 4), -3 .. 2" in str(found)


def test_a_product_that_overflows_fp16_is_to_be_kept_in_fp32() -> None:
    model = Calls(lambda x: x)
    nn.init.constant_(model.last.weight, 6e4)
    nn.init.constant_(model.first.weight, 1)
    with castwise.autocast("cpu", dtype=torch.float16):
        found = diagnose(model, mean, ONES)
    assert (found.phase, found.module, found.op, found.remedy) == ("forward", "last", "aten.addmm", "float32")
    policy = 'castwise.Policy(compute="float16", modules={"last": "float32"})'
    assert found.advice == f'keep last in fp32: castwise.autocast("cpu", policy={policy}.bind(model))'
    with_policy = f"policy = {policy}\n# instead of the line of the autocast region:\nwith castwise.autocast("
    assert found.code == f'import castwise\n{with_policy}"cpu", policy=policy.bind(model)):'
    assert re.fullmatch(r"In the forward, aten.addmm in module last gives inf(, at .*)?\.", found.summary)
    names = ("phase", "module", "op", "remedy", "advice", "code", "summary", "tried", "sample")
    record = DiagnosisRecord.of(3, "overflow", found).to_json()
    fields = {**{name: getattr(found, name) for name in names}, "text": str(found)}
    assert record == {"kind": "diagnosis", "step": 3, "cause": "overflow", "rank": None, **fields}
    region = found.advice.partition(": ")[2]
    for code in (found.code, f"import castwise\nwith {region}:"):  # what is to be copied runs
        rule: dict[str, Any] = {"model": model, "x": torch.ones(1, 4)}
        exec(f"{code}\n    output = model(x)", rule)
        assert rule["output"].isfinite().all()
    with torch.no_grad():
        exact = model.last.double()(model.first.double()(ONES.double()))
    assert found.in_float32 is not None
    assert found.in_float32[0].highest == pytest.approx(exact.max().item(), rel=1e-2)
    # It is as it says.
    model.float()
    with castwise.autocast("cpu", policy=Policy("float16", modules={"last": "float32"}).bind(model)):
        assert not diagnose(model, mean, ONES)


def test_a_cast_that_overflows_belongs_to_the_module_that_needs_it() -> None:
    for plant in ("weight", "input"):
        model = Calls(lambda x: x)
        if plant == "weight":
            nn.init.constant_(model.last.weight, 7e4)
        with castwise.autocast("cpu", dtype=torch.float16):
            found = diagnose(model, mean, ONES if plant == "weight" else 7e4 * ONES)
        assert (found.module, found.op, found.remedy) == (
            "last" if plant == "weight" else "first",
            "aten.to",
            "float32",
        )
        assert found.inputs[0].largest == pytest.approx(7e4)


def test_an_op_without_a_finite_result_in_fp32_is_not_blamed_on_the_precision() -> None:
    with castwise.autocast("cpu", dtype=torch.bfloat16):
        found = of(lambda x: x.bfloat16() / 0)
    assert (found.module, found.remedy) == ("inner", "code")


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_input_is_named_with_its_index(bad: float) -> None:
    x = torch.randn(3, 4)
    x[1, 2] = bad
    for batch, name in ((x, "0"), ((x,), "0"), ({"x": x}, "x")):
        found = diagnose(Calls(lambda x: x), mean, batch)
        assert (found.phase, found.argument, found.index, found.value) == ("input", name, (1, 2), str(bad))
        assert found.remedy == "input"
        assert f"input {name} is {bad} at (1, 2)" in str(found)


def test_a_weight_that_is_lost_is_named_if_it_is_used() -> None:
    model = nn.ModuleDict({"used": Calls(lambda x: x), "unused": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign, assignment]
    with torch.no_grad():
        model["unused"].weight[1, 0] = NAN
    assert not diagnose(model, mean, ONES)
    with torch.no_grad():
        model["used"].last.weight[1, 0] = model["used"].last.bias[0] = NAN  # type: ignore[union-attr, index, operator]
    found = diagnose(model, mean, torch.full((2, 4), NAN))
    assert (found.phase, found.module, found.parameter) == ("weight", "used.last", "used.last.weight")
    assert (found.index, found.value, found.remedy) == ((1, 0), "nan", "weight")
    assert str(found).startswith("weight: used.last.weight is nan at (1, 0)")
    assert "2 more weights are not finite" in found.advice


def test_a_row_of_an_embedding_counts_if_it_is_looked_up() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight[3, 1] = NAN  # type: ignore[operator, index]
    assert not diagnose(model, mean, torch.tensor([0, 1, 2]))
    found = diagnose(model, mean, torch.tensor([0, 3]))
    assert (found.phase, found.parameter, found.index) == ("weight", "0.weight", (3, 1))


def test_a_weight_that_reaches_a_gradient_only_is_named() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.gate = nn.Parameter(torch.tensor([1.0, NAN])), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0, self.gate * self.weight, x)

    found = diagnose(Gated(), mean, torch.tensor([1.0, -1.0]))
    assert (found.phase, found.parameter, found.index) == ("weight", "weight", (1,))


def test_a_buffer_counts_if_it_reaches_the_loss() -> None:
    norm = nn.BatchNorm1d(4)
    norm.running_mean[2] = NAN  # type: ignore[index]
    model = nn.Sequential(norm, nn.Linear(4, 1))
    assert not diagnose(model, mean, ONES)  # in training it is not read
    found = diagnose(model.eval(), mean, ONES)
    assert (found.phase, found.module, found.parameter, found.index) == ("weight", "0", "0.running_mean", (2,))


@pytest.mark.parametrize("scale", [1.0, 2.0**24])
def test_gradients_that_overflow_at_any_scale_are_the_modules_fault(scale: float) -> None:
    with castwise.autocast("cpu", dtype=torch.float16):
        found = of(with_multiplied_gradient, scale=scale)
    assert (found.phase, found.module, found.op, found.remedy) == ("backward", "inner", "aten.mul", "float32")
    assert found.parameter == "first.weight"
    assert "which reaches the gradient of first.weight" in str(found)


def test_gradients_that_overflow_at_this_scale_ask_for_a_lower_one() -> None:
    with castwise.autocast("cpu", dtype=torch.float16):
        found = of(lambda x: x, loss_fn=lambda y: y.float().sum(), scale=2.0**20)
        assert (found.phase, found.remedy, found.scale) == ("backward", "scale", 2.0**20)
        made = 'scaler = castwise.GradScaler("cpu", init_scale=2.0**15)'
        assert found.code == f"# where the scaler is made:\nimport castwise\n{made}"
        assert "2^15 or less" in found.advice  # the gradient of a sum is 1, and 2^16 is too large for fp16
        assert not of(lambda x: x, loss_fn=lambda y: y.float().sum(), scale=2.0**14)


def test_a_loss_that_overflows_when_it_is_scaled_is_the_scales_fault() -> None:
    found = of(lambda x: x, loss_fn=lambda y: y.mean() * 1e35, scale=2.0**24)
    assert (found.phase, found.in_loss, found.remedy) == ("loss", True, "scale")


def test_the_loss_function_is_to_blame_for_what_it_makes() -> None:
    found = of(lambda x: x, loss_fn=lambda y: (y.mean() - y.mean()).log())
    assert (found.phase, found.in_loss, found.module, found.op) == ("loss", True, "", "aten.log")
    assert "loss: the loss function: aten.log gives inf" in str(found)
    targets = torch.tensor([0.0, NAN])
    found = of(lambda x: x, loss_fn=lambda y: F.mse_loss(y[:, 0], targets))
    assert (found.phase, found.in_loss, found.remedy) == ("loss", True, "input")
    assert "targets" in found.advice
    with castwise.autocast("cpu", dtype=torch.float16):
        found = of(lambda x: x, loss_fn=lambda y: (y * 5e4).sum())
    assert (found.phase, found.remedy) == ("loss", "float32")


def test_the_gradient_of_a_square_root_at_zero_is_found_in_the_backward() -> None:
    found = of(lambda x: torch.where(x > 9, (x - x).sqrt(), x) * 2)
    assert (found.phase, found.module, found.op) == ("backward", "inner", "aten.div")
    assert found.loss is not None
    assert math.isfinite(found.loss)


def test_where_the_forward_is_at_fault_for_a_gradient_it_is_named() -> None:
    found = of(lambda x: torch.where(x > 9, (100 * (x + 9)).exp(), x) * 2)
    assert (found.phase, found.module, found.op, found.parameter) == ("forward", "inner", "aten.exp", "first.weight")


def test_hooks_of_a_parameter_belong_to_its_module() -> None:
    model = Calls(lambda x: x)
    model.last.bias.register_hook(lambda grad: grad / 0)
    found = diagnose(model, mean, ONES)
    assert (found.phase, found.module, found.op, found.parameter) == ("backward", "last", "aten.div", "last.bias")


def test_the_first_of_several_is_named() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.a, self.b = Calls(lambda x: x / 0), Calls(lambda x: x / 0)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return self.b(x) + self.a(x)  # type: ignore[no-any-return]

    assert diagnose(Several(), mean, ONES).module == "b.inner"


def test_a_module_that_is_called_twice_and_a_tied_weight() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
            self.other.weight = self.linear.weight
            nn.init.constant_(self.linear.weight, 100)

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.linear(self.linear(x)))  # type: ignore[no-any-return]

    with castwise.autocast("cpu", dtype=torch.float16):
        found = diagnose(Twice(), mean, ONES)
    assert (found.module, found.op) == ("linear", "aten.addmm")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.first(x), use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    stepped = []
    model = Checkpointed(Calls(lambda x: x))
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: stepped.append(param))
    assert not diagnose(model, mean, ONES)
    found = diagnose(Checkpointed(Calls(lambda x: x / 0)), mean, ONES)
    assert (found.phase, found.module, found.op) == ("forward", "block.inner", "aten.div")
    bad = Checkpointed(Calls(lambda x: with_multiplied_gradient(with_multiplied_gradient(x))))
    found = diagnose(bad, mean, ONES)
    assert (found.phase, found.module, found.op) == ("backward", "block.inner", "aten.mul")
    assert stepped == []
    assert all(param.grad is None for param in model.parameters())


def test_names_are_those_without_wrappers() -> None:
    found = diagnose(torch.compile(Calls(lambda x: x / 0), backend="eager"), mean, ONES)
    assert (found.module, found.op) == ("inner", "aten.div")


# -- what is no fault ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.masked_fill(torch.eye(2, 4).bool(), -INF).softmax(-1),
        lambda x: torch.where(torch.eye(2, 4).bool(), x, -INF).softmax(-1),
        lambda x: (x + torch.full((2, 4), -INF).triu(1)).softmax(-1),
        lambda x: (x + torch.tensor([0.0, -INF, 0.0, -INF])).softmax(-1),
        lambda x: x.masked_fill(x > -9, -INF).exp() + x,
        lambda x: torch.where(x > -9, x, x.detach().sub(9).log()),
        lambda x: F.max_pool1d(x[None], 3, padding=1, stride=1)[0],
        lambda x: torch.full_like(x, NAN).copy_(x),
        lambda x: torch.empty(2, 4).fill_(NAN).fill_(1.0) * x,
        lambda x: x.clone().fill_(INF).clamp(max=3) + x,
        lambda x: x.detach().clone().div_(0).mul_(0).zero_() + x,
        lambda x: x + torch.ones(2, 2, 4).select(0, 1).copy_(torch.full((2, 4), NAN)).nan_to_num(),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0],
        lambda x: x.to_sparse().to_dense(),
        lambda x: torch.view_as_real(torch.fft.fft(x)).sum(-1),
    ],
)  # fmt: skip
def test_nothing_is_blamed_where_infinities_reach_nothing(function: Any) -> None:
    found = of(function)
    assert not found
    assert str(found).startswith("clean: the loss and all gradients are finite (loss")
    assert replace(found, harmless=()) == Diagnosis(False, loss=found.loss, outside_region=True)
    assert {each.op for each in found.harmless} <= {"aten.log", "aten.div_"}  # ops that have made some in full view


def test_a_mask_may_be_a_trained_parameter() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.zeros(4, 4).masked_fill(torch.eye(4).bool(), -INF))
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) + self.mask).softmax(-1)  # type: ignore[no-any-return]

    assert not diagnose(Masked(), lambda y: y[:, 0].sum(), torch.ones(4, 4))


def test_a_fault_beside_masks_is_distinguished_from_them() -> None:
    mask = torch.zeros(2, 2).masked_fill(torch.eye(2).bool(), -INF)

    class Attention(nn.Module):
        def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.calls = Calls(function)
            self.register_buffer("mask", mask.clone())

        def forward(self, x: Tensor, given: Tensor) -> Tensor:
            x = self.calls(x)
            masked = (x @ x.T + self.mask).masked_fill(torch.zeros(2, 2).bool(), -INF) + given
            return masked.softmax(-1) @ x  # type: ignore[no-any-return]

    given = torch.zeros(2, 2).masked_fill(torch.eye(2).bool(), -INF)
    assert not diagnose(Attention(lambda x: x), mean, (ONES, given))
    for function, op in ((lambda x: x / 0, "aten.div"), (lambda x: (x - 9).log(), "aten.log")):
        found = diagnose(Attention(function), mean, (ONES, given))
        assert (found.module, found.op) == ("calls.inner", op)
    found = diagnose(Attention(lambda x: x), mean, (ONES, given.T.flip(0)))  # all of it is masked
    assert (found.module, found.op) == ("", "aten.softmax")


def test_memory_that_is_not_written_is_blamed_only_if_it_is_read() -> None:
    def scratch(rows: int) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            memory = x.new_empty(3, 4)
            memory.untyped_storage().fill_(255)  # NaN, as some of what is there may be
            memory[:2] = x
            return memory[:rows] + 0

        return function

    assert not of(scratch(2))
    found = of(lambda x: x + scratch(3)(x)[2])
    assert (found.phase, found.module, found.remedy, found.op) == ("forward", "inner", "code", "aten.new_empty")
    found = of(lambda x: scratch(2)(x / 0))
    assert (found.module, found.op) == ("inner", "aten.div")


# -- what is put back -------------------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


class Careless(nn.Module):
    """Changes what it can."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.embedding = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Embedding(4, 4, max_norm=0.1)
        self.register_buffer("calls", torch.tensor(-0.0))
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls * 0 + 1
        with torch.no_grad():
            self.linear.weight.mul_(2)
            self.linear.bias.data += 1
            x.add_(1)
        self.linear.eval()
        self.register_buffer("new", x)
        noise = random.random() + np.random.rand() + torch.rand(())
        y = self.norm(self.linear(x)) * noise + self.embedding(torch.arange(2))
        self.linear.weight.grad.zero_()  # type: ignore[union-attr]
        if self.fails:
            raise RuntimeError("planted")
        return y / 0  # type: ignore[no-any-return]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_it_was_bit_for_bit(fails: bool) -> None:
    model, x = Careless(fails), torch.randn(2, 4)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    x.requires_grad_(False)

    def state() -> Any:
        return (
            {name: (id(value), bits(value)) for name, value in [*model.named_parameters(), *model.named_buffers()]},
            [(id(param.grad), bits(param.grad)) for param in model.parameters() if param.grad is not None],
            [module.training for module in model.modules()],
            [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()],
            (bits(x), x.grad),
            (bits(torch.get_rng_state()), random.getstate(), str(np.random.get_state())),
        )

    before = state()
    if fails:
        with pytest.raises(RuntimeError, match="planted"):
            diagnose(model, mean, x, GradScaler("cpu"))
    else:
        assert diagnose(model, mean, x, GradScaler("cpu")).op == "aten.div"
    assert state() == before


def test_the_training_goes_on_as_if_nothing_had_been() -> None:
    def weights(with_diagnosis: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=2.0**30)
        for _ in range(3):
            x = torch.randn(8, 4)
            with castwise.autocast("cpu", dtype=torch.float16):
                loss = model(x).float().square().mean()
                if with_diagnosis:
                    diagnose(model, mean, x, scaler)
                loss = loss + model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return list(model.state_dict().values())

    for left, right in zip(weights(False), weights(True), strict=True):
        assert bits(left) == bits(right)


def test_it_runs_in_the_callers_region_and_grad_mode() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return Noted.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            return grad

    for region in (torch.autocast, castwise.autocast):
        with torch.no_grad(), region("cpu", dtype=torch.bfloat16):
            assert not of(function)
            assert torch.is_autocast_enabled("cpu")
    assert seen == 2 * [(True, True), (False, False)]


def test_a_model_without_gradients_is_replayed_forward() -> None:
    model = Calls(lambda x: x / 0).requires_grad_(False)
    assert diagnose(model, mean, ONES).module == "inner"
    assert not diagnose(Calls(lambda x: x).requires_grad_(False), mean, ONES)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: diagnose(3, mean, ONES), TypeError, r"model must be a torch\.nn\.Module, got int"),
        (lambda m: diagnose(m, mean, [ONES]), TypeError, "batch must be a tensor, a tuple .* or a dict .*, got list"),
        (lambda m: diagnose(m, lambda y: 3.0, ONES), TypeError, "loss_fn must return the loss as a tensor, got float"),
        (lambda m: diagnose(m, lambda y: y, ONES), RuntimeError, r"must have one element, got shape \(2, 4\)"),
        (lambda m: diagnose(m, mean, ONES, 3), TypeError, "scaler must be a GradScaler or None, got int$"),
        (
            lambda m: diagnose(m, F.mse_loss, ONES, ONES),
            TypeError,
            r"got Tensor\. Pass several inputs of the model as a tuple, diagnose\(model, loss_fn, \(x, mask\), "
            r"scaler\), and targets in the loss function: lambda outputs: loss_fn\(outputs, targets\)$",
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(Calls(lambda x: x))


# -- what is harmless -------------------------------------------------------------------------------------------------


class SqueezeAndExcitation(nn.Module):
    """An EfficientNet in small: its gate overflows in fp16, and the sigmoid makes 0 or 1 of that."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.end = nn.Conv2d(3, 4, 1), end
        self.gate = nn.Sequential(nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 1))
        for conv, weight in ((self.stem, 0.5), (self.gate[0], 50.0), (self.gate[2], 6e4)):
            nn.init.constant_(conv.weight, weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid()
        return self.end(x.mean((2, 3)))


def diagnosed_in_fp16(end: Callable[[Tensor], Tensor]) -> Diagnosis:
    with castwise.autocast("cpu", dtype=torch.float16):
        return diagnose(SqueezeAndExcitation(end), mean, torch.ones(2, 3, 4, 4))


@pytest.mark.filterwarnings("ignore:this CPU has no units for torch.float16:UserWarning")
def test_an_overflow_that_a_sigmoid_makes_harmless_is_reported_of_beside_no_fault() -> None:
    found = diagnosed_in_fp16(lambda x: x)
    assert not found
    (harmless,) = found.harmless
    assert (harmless.module, harmless.op, harmless.value) == ("gate.2", "aten.convolution", "inf")
    assert harmless.is_finite_in_float32
    assert "  harmless: gate.2: aten.convolution gives inf (finite in fp32)" in str(found).splitlines()


@pytest.mark.filterwarnings("ignore:this CPU has no units for torch.float16:UserWarning")
def test_an_overflow_before_a_sigmoid_is_not_called_harmless_beside_a_fault_in_the_forward() -> None:
    found = diagnosed_in_fp16(lambda x: (x - x).log())
    assert (found.module, found.op, found.in_loss) == ("", "aten.log", False)
    assert found.harmless == ()  # the backward has not run
    assert [(each.module, each.op) for each in found.also] == [("gate.2", "aten.convolution")]
    assert (
        "  also: gate.2: aten.convolution gives inf (finite in fp32); diagnose again after fixing the first"
        in str(found).splitlines()
    )


class ExpOfRow(nn.Module):
    """A softmax written by hand that overflows in one row."""

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row, self.weight = row, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        high = torch.zeros(len(x), 1)
        high[self.row] = 100.0
        scores = (self.weight * x + high).exp()
        return scores / scores.sum(-1, keepdim=True)


def test_a_second_fault_is_not_called_harmless() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), ExpOfRow(0), nn.Linear(4, 4), ExpOfRow(1), nn.Linear(4, 1))
    found = diagnose(model, mean, torch.randn(3, 4))
    assert (found.module, found.op, found.harmless) == ("1", "aten.exp", ())
    assert [str(each) for each in found.also] == ["3: aten.exp gives inf"]  # and was given NaN
    assert "  also: 3: aten.exp gives inf; diagnose again after fixing the first" in str(found).splitlines()
    model[1] = nn.Identity()
    again = diagnose(model, mean, torch.randn(3, 4))
    assert (again.module, again.op, again.also) == ("3", "aten.exp", ())


def test_a_second_fault_whose_values_reach_the_loss_too_is_named() -> None:
    found = of(lambda x: (x - 999).sqrt() + (x - 999).log())
    assert (found.op, [str(each) for each in found.also]) == ("aten.sqrt", ["inner: aten.log gives nan"])


def test_what_only_passes_on_the_first_fault_is_no_second_one() -> None:
    assert of(lambda x: (x + 999).exp().softmax(-1).square().sqrt()).also == ()


def test_a_gradient_that_a_forward_overflow_would_lose_is_not_called_harmless() -> None:
    def where(x: Tensor) -> Tensor:
        return torch.where(x > 9, (x + 999).exp(), x)

    assert of(where).phase == "forward"  # through the gradient, 0 * inf
    found = of(lambda x: where(x) + (x - 999).sqrt())
    assert (found.op, found.harmless) == ("aten.sqrt", ())
    assert [each.op for each in found.also] == ["aten.exp"]


def test_clean_outside_of_a_region_says_so() -> None:
    hint = "  no autocast region was active: if training uses one, call diagnose inside it"
    assert hint in str(of(lambda x: x)).splitlines()
    assert hint not in str(of(lambda x: x / 0))
    for region in (
        torch.autocast("cpu", dtype=torch.bfloat16),
        castwise.autocast("cpu", policy=castwise.Policy(compute="bfloat16").bind(Calls(lambda x: x))),
    ):
        with region:
            assert hint not in str(of(lambda x: x))


def test_what_has_led_to_the_fault_and_what_is_meant_is_not_called_harmless() -> None:
    assert of(lambda x: (x / 0).sigmoid() + (x - 9).sqrt()).also != ()
    assert of(lambda x: (x / 0) * 0).harmless == ()
    assert of(lambda x: x.masked_fill(x > 0.5, -INF).softmax(-1)).harmless == ()
    assert of(lambda x: (x + (x > 9).float().log()).exp()).harmless == ()  # -inf of a mask that is a logarithm
    assert of(lambda x: (x / 0) * 0).also == ()
    found = of(lambda x: x, loss_fn=lambda y: y.sum() + (y / 0).sigmoid().sum().detach())
    assert [str(each) for each in found.harmless] == ["the loss function: aten.div gives inf"]


def test_a_replayed_step_without_a_fault_tells_what_was_harmless() -> None:
    model = Calls(lambda x: x + (1e9 * x.detach()).exp().reciprocal())
    recording = Recording(model)
    recording.attach()
    model(ONES).sum().backward()
    recorded = recording.take().diagnose(1.0)
    recording.detach()
    assert recorded is not None
    assert not recorded
    assert [(each.module, each.op) for each in recorded.harmless] == [("inner", "aten.exp")]


# -- where ------------------------------------------------------------------------------------------------------------


class Mixer(nn.Module):
    """A state-space mixer in small: what overflows is computed in its own forward, among its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(4, 4), nn.Linear(4, 4)
        self.a_log = nn.Parameter(torch.full((4,), 100.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.in_proj(x)
        decay = -torch.exp(self.a_log)  # here
        return self.out_proj(x + decay)  # type: ignore[no-any-return]


def line_with(comment: str) -> tuple[int, str]:
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    return next((number, line.strip()) for number, line in lines if line.endswith(comment))


def test_the_line_is_named_of_an_op_in_a_modules_own_forward() -> None:
    found = diagnose(nn.Sequential(nn.Linear(4, 4), Mixer()), mean, ONES)
    number, source = line_with("# here")
    assert (found.module, found.op) == ("1", "aten.exp")
    assert (found.line, found.source) == (f"{__file__}:{number}", source)
    assert f"  at {__file__}:{number}: {source}" in str(found).splitlines()


def test_the_line_is_named_of_an_op_of_the_loss_and_of_a_layer() -> None:
    assert of(lambda x: x, loss_fn=lambda y: y.sum() / 0).source.startswith("assert of(lambda x: x, loss_fn=")
    model = Mixer()
    nn.init.zeros_(model.a_log)
    nn.init.constant_(model.out_proj.weight, 1e38)
    found = diagnose(model, mean, 1e9 * ONES)
    assert (found.module, found.source.startswith("return self.out_proj")) == ("out_proj", True)


def test_a_negative_number_to_a_fractional_power_is_told_from_an_overflow() -> None:
    assert "keep its base positive, or clamp it" in of(lambda x: (-x) ** -0.5).advice
    assert "keep its base positive" not in of(lambda x: (-9 * x) ** 99).advice


@pytest.mark.parametrize(
    ("function", "op", "advice"),
    [
        (lambda x: (x - x).sqrt(), "aten.sqrt", "add an epsilon inside, (x + 1e-8).sqrt()"),
        (lambda x: (x * 0).abs().pow(0.5), "aten.pow", "add an epsilon inside, (x + 1e-8) ** p"),
        (lambda x: torch.acos(x * 0 + 1), "aten.acos", "clamp its input to within 1 - 1e-6"),
    ],
)
def test_the_line_of_the_forward_is_named_for_a_fault_of_its_gradient(function: Any, op: str, advice: str) -> None:
    found = of(function)
    assert (found.phase, found.gradient_of, advice in found.advice) == ("backward", op, True)
    assert f"{__file__}:{function.__code__.co_firstlineno}" == found.line
    assert f"the gradient of {op}" in found.summary


def test_the_code_of_a_fault_in_an_op_is_its_line_with_a_bound() -> None:
    def normalized(x: Tensor) -> Tensor:
        return x / x.mul(0).norm(dim=-1, keepdim=True)

    line = normalized.__code__.co_firstlineno + 1
    found = of(normalized)
    bounded = f"# instead of line {line}:\nreturn x / x.mul(0).norm(dim=-1, keepdim=True).clamp_min(1e-12)"
    assert (found.line, found.code) == (f"{__file__}:{line}", bounded)
    assert bounded in found._repr_html_()
    assert of(lambda x: x / (x - x)).code == ""  # the divisor may be negative


def test_the_line_of_a_mamba_of_transformers_is_named() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=16, hidden_size=8, state_size=4, num_hidden_layers=2)
    model = transformers.MambaForCausalLM(config)
    with torch.no_grad():
        model.backbone.layers[1].mixer.A_log.fill_(100.0)
    found = diagnose(model, lambda output: output.logits.mean(), {"input_ids": torch.arange(6)[None]})
    assert (found.module, found.op) == ("backbone.layers.1.mixer", "aten.exp")
    assert "modeling_mamba.py:" in found.line
    assert "torch.exp(self.A_log" in found.source


@pytest.mark.parametrize("module", [nn.BatchNorm1d(4), nn.InstanceNorm1d(2, track_running_stats=True)])
def test_an_inf_of_a_batch_is_blamed_and_not_the_statistics_that_an_earlier_forward_has_spoilt(
    module: nn.Module,
) -> None:
    x = torch.ones(3, 2, 4)[:, 0] if isinstance(module, nn.BatchNorm1d) else torch.ones(3, 2, 4)
    x = x.index_fill(0, torch.tensor([1]), torch.inf)
    module(x)  # as in the step that failed
    found = diagnose(module, mean, x)
    assert (found.phase, found.argument, found.value) == ("input", "0", "inf")
    module.eval()
    assert diagnose(module, mean, torch.ones_like(x)).parameter.startswith("running_")


def test_the_row_of_a_weight_that_no_format_can_multiply_is_named() -> None:
    model = nn.Sequential(nn.Embedding(64, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[55] = 3e38
        model[1].weight.fill_(2.0)
    with castwise.autocast("cpu", dtype=torch.bfloat16):
        found = diagnose(model, mean, torch.tensor([[3, 55]]))
    assert (found.module, found.remedy, found.code) == ("1", "weight", "")
    assert found.advice.startswith("0.weight[55] has the magnitude 3e+38, and the median row ")
