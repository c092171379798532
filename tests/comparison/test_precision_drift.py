"""`compare`: effects and errors as computed by hand in fp64, whatever the model is made of, and everything put back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from tests.comparison import planted
from tests.distributed import ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import Policy, policies
from castwise.comparison import Drift, Errors

BF16 = {"bf16": policies.bf16}
FP32 = {"fp32": Policy(compute="float32")}


@pytest.fixture(autouse=True)
def _with_units_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes are the same on all CPUs."""
    monkeypatch.setattr("castwise.comparison._precision_drift.is_native_here", lambda dtype: True)


def mlp(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(width: int = 8, size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(1)), torch.arange(size) % 4


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float() if output.dtype is not torch.float64 else output, target.to(output.dtype))


def relative_rms(errors: Errors | None) -> float:
    assert errors is not None
    return errors.relative_rms


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


# By hand.


def test_effects_and_errors_are_those_computed_by_hand_in_fp64() -> None:
    model, (x, target) = mlp(), batch()
    first, last = model[0], model[2]

    def in_bf16(module: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return module(x)  # type: ignore[no-any-return]

    # The reference in fp64, and what each module makes of its values, rounded as the policy hands them over.
    double = copy.deepcopy(model).double()
    a = double[0](x.double())
    b = double[1](a)
    y = double[2](b)
    loss = F.cross_entropy(y, target)
    gradients = torch.autograd.grad(loss, [a, b, y])
    given = {"0": x, "1": a.detach().bfloat16(), "2": b.detach().bfloat16()}
    errors = {
        name: in_bf16(module, given[name]).double() - twin(given[name].double()).detach()
        for name, module, twin in zip("012", model, double, strict=True)
    }
    policy_a = in_bf16(first, x)
    policy_y = in_bf16(last, model[1](policy_a))

    drift = castwise.compare(model, [(x, target)], BF16, loss=F.cross_entropy, reference="float64")["bf16"]
    for name, gradient in zip("012", gradients, strict=True):
        found = drift[name]
        assert found.effect == pytest.approx(rms(gradient * errors[name]), rel=1e-9)
        assert found.loss_shift == pytest.approx(float((gradient * errors[name]).norm()), rel=1e-9)
    introduced, total, carried = drift["2"].introduced, drift["2"].total, drift["2"].carried
    assert introduced is not None
    assert total is not None
    assert carried is not None
    twin_y = double[2](given["2"].double()).detach()
    assert introduced.relative_rms == pytest.approx(rms(errors["2"]) / rms(twin_y), rel=1e-9)
    assert introduced.largest == pytest.approx(float(errors["2"].abs().max()), rel=1e-9)
    assert introduced.bias == pytest.approx(float(errors["2"].mean()) / rms(twin_y), rel=1e-9)
    total_error = policy_y.double() - y.detach()
    assert total.relative_rms == pytest.approx(rms(total_error) / rms(y.detach()), rel=1e-9)
    assert carried.relative_rms == pytest.approx(rms(total_error - errors["2"]) / rms(y.detach()), rel=1e-9)
    expected = torch.cosine_similarity(y.detach().flatten(), policy_y.double().flatten(), 0)
    assert total.cosine == pytest.approx(float(expected), rel=1e-12)


def test_gradients_and_loss_are_those_of_the_policys_own_run() -> None:
    model, (x, target) = mlp(), batch()
    params = list(model.parameters())
    expected = torch.autograd.grad(F.cross_entropy(model(x), target), params)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), target)
    found = torch.autograd.grad(loss, params)
    flat, flat_expected = (torch.cat([each.double().flatten() for each in grads]) for grads in (found, expected))

    drift = castwise.compare(model, [(x, target)], BF16, loss=F.cross_entropy)["bf16"]
    summary = drift.summary
    assert summary.loss == float(loss)
    reference = float(F.cross_entropy(model(x), target).detach())
    assert summary.reference_loss == reference
    assert summary.relative_loss_error == pytest.approx(abs(float(loss) - reference) / reference)
    assert summary.gradient_cosine == pytest.approx(float(torch.cosine_similarity(flat, flat_expected, 0)))
    assert summary.gradient_norm_ratio == pytest.approx(float(flat.norm() / flat_expected.norm()))
    of_last = torch.cat([each.flatten() for each in found[2:]]) - torch.cat([each.flatten() for each in expected[2:]])
    scale = torch.cat([each.flatten() for each in expected[2:]])
    assert relative_rms(drift["2"].gradients) == pytest.approx(rms(of_last) / rms(scale), rel=1e-5)
    assert drift["1"].gradients is None


def in_bf16(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return function(*args)


@pytest.mark.parametrize("reference", ["float32", "float64"])
def test_gradients_are_split_as_computed_by_hand_in_fp64(reference: Any) -> None:
    model, (x, target) = mlp(), batch()
    double = copy.deepcopy(model).double()
    a = double[0](x.double())
    b = double[1](a)
    y = double[2](b)
    params = list(double.parameters())
    of_a, of_y, *expected = torch.autograd.grad(F.cross_entropy(y, target), [a, y, *params])
    # Each layer by itself, given the reference's values and gradients in the dtypes that the policy hands over.
    introduced = []
    for place, given, gradient in ((0, x, of_a), (2, b.detach().bfloat16(), of_y)):
        handed_over = gradient.bfloat16()
        made = in_bf16(model[place], given), double[place](given.double())
        here = torch.autograd.grad(made[0], [*model[place].parameters()], handed_over)
        there = torch.autograd.grad(made[1], [*double[place].parameters()], handed_over.double())
        introduced += [low.double() - exact for low, exact in zip(here, there, strict=True)]
    loss = in_bf16(lambda x: F.cross_entropy(model(x), target), x)
    total = torch.autograd.grad(loss, [*model.parameters()])

    drift = castwise.compare(model, [(x, target)], BF16, loss=F.cross_entropy, reference=reference)["bf16"]
    for name, at in (("0", slice(0, 2)), ("2", slice(2, 4))):
        own, of_reference, of_policy = (
            torch.cat([each.double().flatten() for each in grads[at]]) for grads in (introduced, expected, total)
        )
        exactness = 1e-5 if reference == "float32" else 1e-9
        found = drift[name]
        assert relative_rms(found.introduced_gradients) == pytest.approx(rms(own) / rms(of_reference), rel=exactness)
        carried = of_policy - of_reference - own
        assert relative_rms(found.carried_gradients) == pytest.approx(rms(carried) / rms(of_reference), rel=exactness)
        assert 1e-4 < relative_rms(found.introduced_gradients) < 1e-2
    assert drift["1"].introduced_gradients is None


def split(model: nn.Module, policy: Policy, loss: Any = F.cross_entropy) -> dict[str, tuple[float, float]]:
    """Return the introduced and the carried error of the gradients of each module."""
    drift = castwise.compare(model, [batch()], {"p": policy}, loss=loss, reference="float64")["p"]
    return {
        each.name: (relative_rms(each.introduced_gradients), relative_rms(each.carried_gradients))
        for each in drift.modules
        if each.gradients is not None
    }


def test_a_module_in_fp32_carries_what_is_off_in_its_gradients() -> None:
    found = split(mlp(), Policy(compute="float32", modules={"0": "bfloat16"}))
    assert found["0"][0] > 1e-3
    assert found["2"][0] < 1e-6 < 1e-4 < found["2"][1]
    found = split(mlp(), Policy(compute="float32", modules={"2": "bfloat16"}))
    assert found["0"][0] < 1e-6 < 1e-4 < found["0"][1]


def test_gradients_of_a_weight_that_several_modules_use_are_split_as_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.ones(8))
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.second(self.first(x) * self.scale)
            # A weight that is read beside its module, and one that is not used in any.
            return hidden @ self.first.weight[:4].T

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + model.scale.square().sum()

    model = Tied()
    found = split(model, policies.bf16, loss)
    assert found["first"][0] > 1e-4
    assert found["second"][0] > 1e-4
    assert 0 < found[""][0] < 1e-2
    exact = split(model, FP32["fp32"], loss)
    assert max(error for pair in exact.values() for error in pair) < 1e-6


def test_gradients_of_parts_that_checkpoints_and_fp16_scale_are_split() -> None:
    found = [
        castwise.compare(Checkpointed(kind), [batch()], {"fp16": policies.fp16}, loss=F.cross_entropy)["fp16"]
        for kind in (None, False, True)
    ]
    for module in found[0].modules:
        if module.gradients is not None:
            expected = relative_rms(module.introduced_gradients)
            assert 1e-5 < expected < 1e-2
            for other in found[1:]:
                assert relative_rms(other[module.name].introduced_gradients) == pytest.approx(expected, rel=1e-3)
    tiny = castwise.compare(mlp(), [batch()], {"fp16": policies.fp16}, loss=lambda y, t: F.cross_entropy(y, t) * 1e-6)[
        "fp16"
    ]
    assert relative_rms(tiny["0"].introduced_gradients) < 1e-2  # and not lost below the least number of fp16


def test_without_gradients_no_backward_of_a_policy_runs() -> None:
    found = castwise.compare(mlp(), [batch()], BF16, loss=F.cross_entropy, gradients=False)
    assert [name for name in found.summary_rows()[0] if "gradient" in name or "norm" in name] == [], "no empty columns"
    drift = found["bf16"]
    assert drift.summary.gradient_cosine is None
    assert drift["0"].gradients is None
    assert drift["0"].effect is not None
    assert drift["0"].effect > 0


def test_a_policy_that_computes_as_the_reference_has_no_error_at_all() -> None:
    drift = castwise.compare(mlp(), [batch()], FP32, loss=F.cross_entropy)["fp32"]
    assert [module.effect for module in drift.modules] == [0.0] * 4
    assert all(relative_rms(module.total) == 0.0 for module in drift.modules)
    assert drift.summary.gradient_cosine == pytest.approx(1.0)
    assert drift.summary.relative_loss_error == 0.0


def test_rules_of_modules_decide_in_what_each_is_called_again() -> None:
    policy = Policy(compute="float32", modules={"2": "bfloat16"})
    drift = castwise.compare(mlp(), [batch()], {"last": policy}, loss=F.cross_entropy)["last"]
    assert drift.modules[0].name == "2"
    assert drift.modules[0].computes_in == "bfloat16"
    assert [module.effect for module in drift.modules[1:]] == [0.0] * 3
    assert relative_rms(drift["0"].total) == 0.0


def test_op_rules_hold_in_modules_that_are_called_again() -> None:
    class Softmax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 8).softmax(-1)

    model = nn.Sequential(nn.Linear(8, 8), Softmax(), nn.Linear(8, 4))
    policy = Policy(compute="float32", ops={"softmax": "bfloat16"})
    drift = castwise.compare(model, [batch()], {"softmax": policy}, loss=F.cross_entropy)["softmax"]
    assert drift.modules[0].name == "1"
    assert drift.modules[0].effect != 0.0
    assert [module.effect for module in drift.modules[1:]] == [0.0] * 3


def test_a_reference_may_be_a_policy() -> None:
    bf16 = policies.bf16
    drift = castwise.compare(
        mlp(), [batch()], {"same": bf16, "fp32": Policy("float32")}, loss=F.cross_entropy, reference=bf16
    )
    assert drift.reference == "policy"
    assert all(relative_rms(module.total) == 0.0 for module in drift["same"].modules)
    assert relative_rms(drift["fp32"]["2"].introduced) > 0


def test_policies_may_be_bound_and_stay_so() -> None:
    model = mlp()
    bound = Policy(compute="bfloat16", modules={"2": "float32"}).bind(model)
    unbound = Policy(compute="bfloat16", modules={"0": "float32"})
    drift = castwise.compare(model, [batch()], {"bound": bound, "unbound": unbound}, loss=F.cross_entropy)
    assert drift["bound"]["2"].effect == 0.0
    assert drift["unbound"]["0"].effect == 0.0
    assert bound.is_bound
    assert "forward" in vars(model[2])
    assert "forward" not in vars(model[0])
    bound.unbind()
    with pytest.raises(RuntimeError, match="bind it again"):
        castwise.compare(model, [batch()], {"bound": bound}, loss=F.cross_entropy)


# What models are made of.


class Attention(nn.Module):
    """Attention whose softmax is an op of its own, between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.out((query @ key.T * 4).softmax(-1) @ value)  # type: ignore[no-any-return]


def test_ops_between_modules_are_those_of_the_module_around() -> None:
    torch.manual_seed(0)
    model = Attention()
    policy = Policy(compute="bfloat16", modules={"qkv": "float32", "out": "float32"})
    x, target = batch()
    drift = castwise.compare(model, [(x, target)], {"p": policy}, loss=F.cross_entropy, reference="float64")["p"]
    assert drift.modules[0].name == ""
    assert max(drift["out"].effect or 0.0, drift["qkv"].effect or 0.0) < 1e-8
    double = copy.deepcopy(model).double()

    def mixed(qkv: Tensor) -> Tensor:
        query, key, value = qkv.chunk(3, -1)
        return (query @ key.T * 4).softmax(-1) @ value

    qkv = double.qkv(x.double())
    passed = mixed(qkv)
    [gradient] = torch.autograd.grad(F.cross_entropy(double.out(passed), target), [passed])
    rounded = qkv.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        low = mixed(rounded)
    error = low.double() - mixed(rounded.double())
    assert drift[""].effect == pytest.approx(rms(gradient * error), rel=1e-9)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        hidden = self.first(x)
        hidden *= 2
        return self.last(self.relu(hidden))  # type: ignore[no-any-return]


class NotInPlace(InPlace):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.relu(self.first(x + 1) * 2))  # type: ignore[no-any-return]


def test_writes_in_place_change_no_figure_and_no_batch() -> None:
    figures = []
    for kind in (InPlace, NotInPlace):
        torch.manual_seed(0)
        x, target = batch()
        before = x.clone()
        drift = castwise.compare(kind(), [(x, target)], BF16, loss=F.cross_entropy)["bf16"]
        assert torch.equal(x, before)
        assert not any(module.problem for module in drift.modules)
        figures.append({module.name: module for module in drift.modules})
    in_place, other = figures
    for name in ("first", "relu", "last", ""):
        assert in_place[name].effect == pytest.approx(other[name].effect)
        assert relative_rms(in_place[name].introduced) == pytest.approx(relative_rms(other[name].introduced))
    assert in_place["first"].total == other["first"].total


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.inner = nn.Linear(8, 8), nn.Linear(8, 4)
        self.unused = nn.Linear(3, 3)
        self.again = self.shared

    def forward(self, x: Tensor, *, mask: Tensor) -> dict[str, Any]:
        hidden = self.shared(self.again(x)) * mask
        return {"logits": self.inner(hidden), "states": (x, [hidden]), "name": "nested"}


def test_several_inputs_nested_outputs_and_shared_modules() -> None:
    x, target = batch()
    inputs = {"x": x, "mask": torch.ones(8)}
    drift = castwise.compare(
        Nested(), [(inputs, target)], BF16, loss=lambda out, target: F.cross_entropy(out["logits"], target)
    )
    found = drift["bf16"]
    assert [module.name for module in found.modules if module.calls == 2] == ["shared"]
    assert drift.not_called == ("unused",)
    assert found.summary.log_probs is not None
    assert found.summary.log_probs.tokens == 6
    assert not drift.notes


def test_a_tuple_is_several_arguments_and_forward_takes_any_batch() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x * y)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, (x, target) = Two(), batch()
    pairs = castwise.compare(model, [((x, x), target)], BF16, loss=F.cross_entropy)["bf16"]
    whole = castwise.compare(
        model,
        [{"x": x, "y": x, "target": target}],
        BF16,
        forward=lambda model, batch: F.cross_entropy(model(batch["x"], batch["y"]), batch["target"]),
    )["bf16"]
    assert whole.modules == pairs.modules
    assert whole.summary.log_probs is None


class Cache:
    """An object that modules write to, as a cache of keys and values."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def update(self, value: Tensor) -> Tensor:
        self.kept.append(value)
        return torch.stack(self.kept).sum(0)


def test_objects_that_modules_write_to_are_as_they_were_when_a_module_is_called_again() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            return cache.update(self.linear(x)).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: Tensor) -> Tensor:
            cache = Cache()
            for layer in self.layers:
                x = layer(x, cache)
            return x

    torch.manual_seed(0)
    drift = castwise.compare(Model(), [batch()], BF16, loss=F.cross_entropy)["bf16"]
    assert not any(module.problem for module in drift.modules)
    assert 1e-4 < relative_rms(drift["layers.1"].introduced) < 1e-2


def test_dropout_draws_the_same_numbers_in_every_run() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop, self.last = nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.dropout(self.drop(self.first(F.dropout(x, 0.2))), 0.3)
            return F.dropout(self.last(hidden), 0.3)

    torch.manual_seed(0)
    model = Dropping().train()
    both = {**FP32, **BF16}
    drift = castwise.compare(model, [batch(), batch()], both, loss=F.cross_entropy, reference="float64")
    for module in drift["fp32"].modules:
        assert relative_rms(module.introduced) < 1e-6
        assert relative_rms(module.total) < 1e-6
    assert all(relative_rms(module.introduced) < 1e-2 for module in drift["bf16"].modules)
    assert drift["fp32"].summary.gradient_cosine == pytest.approx(1.0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_no_figure(use_reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self, checkpoints: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last, self.checkpoints = nn.Linear(8, 8), nn.Linear(8, 4), checkpoints
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = checkpoint(self.block, x, use_reentrant=use_reentrant) if self.checkpoints else self.block(x)
            return self.last(x)  # type: ignore[no-any-return]

    figures = []
    for checkpoints in (True, False):
        model = Model(checkpoints)
        torch.manual_seed(1)
        figures.append(castwise.compare(model, [batch()], BF16, loss=F.cross_entropy)["bf16"])
    assert figures[0] == figures[1]


class Checkpointed(nn.Module):
    """Attention, a shared layer and a function in checkpoints, or outside of any."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last = nn.Linear(8, 8), nn.Linear(8, 8), Attention()
        self.use_reentrant = use_reentrant

    def run(self, function: Callable[..., Tensor], x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(lambda x: self.shared(self.shared(x).tanh()), self.first(x))
        return self.run(self.last, self.run(self.shared, x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_shared_modules_and_of_functions_change_no_figure(use_reentrant: bool) -> None:
    expected, found = (
        castwise.compare(Checkpointed(kind), [batch()], BF16, loss=F.cross_entropy)["bf16"]
        for kind in (None, use_reentrant)
    )
    assert {module.name for module in expected.modules if module.effect} == {
        *("", "first", "shared", "last", "last.qkv", "last.out")
    }
    assert [(module.name, module.effect) for module in found.modules] == [
        (module.name, pytest.approx(module.effect, rel=1e-6)) for module in expected.modules
    ]


def test_a_reentrant_checkpoint_without_gradients_in_training_has_none_in_the_reference() -> None:
    model = Checkpointed(use_reentrant=True)
    model.first.requires_grad_(False)
    x, target = batch()
    F.cross_entropy(model(x), target)
    drift = castwise.compare(model, [(x, target)], BF16, loss=F.cross_entropy)
    assert drift["bf16"].summary.gradient_cosine is None
    assert {module.effect for module in drift["bf16"].modules if module.name} == {None}
    assert "the loss has no gradient, so effects are unknown" in drift.notes

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = model, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))  # type: ignore[no-any-return]

    drift = castwise.compare(Head(), [(x, target)], BF16, loss=F.cross_entropy)
    assert drift["bf16"]["body.shared"].gradients is None
    assert drift["bf16"]["body.shared"].effect is None
    assert drift["bf16"].summary.gradient_cosine == pytest.approx(1.0, abs=1e-3)
    assert drift["bf16"]["head"].effect
    assert any("body.shared" in note and "runs under torch.no_grad()" in note for note in drift.notes)


def test_the_effect_of_a_module_whose_output_is_detached_is_not_known() -> None:
    class Detaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).detach())  # type: ignore[no-any-return]

    drift = castwise.compare(Detaching(), [batch()], {**BF16, **FP32}, loss=F.cross_entropy)
    assert drift["bf16"]["first"].effect is None
    assert drift["bf16"]["first"].introduced is not None
    assert drift["bf16"]["last"].effect
    assert drift["fp32"]["first"].effect == 0.0  # it has no errors
    assert drift.notes == (
        "bf16: first gets no gradient because its output is detached or unused, so its effect is unknown",
    )


def test_what_many_modules_have_in_common_is_one_note() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.encoder(x)
            return self.head(x)  # type: ignore[no-any-return]

    names = ", ".join(f"encoder.{place}" for place in range(5))
    drift = castwise.compare(Frozen(), [batch()], BF16, loss=F.cross_entropy)
    assert drift.notes == (f"bf16: each of {names} and 3 more runs under torch.no_grad(), so its effect is unknown",)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_a_hook_computes_are_those_of_the_run(wrap: Any, training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(wrap(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 4)).train(training)
    x, target = batch()
    attribute = model[0].weight
    drift = castwise.compare(model, [(x, target)], {**BF16, **FP32}, loss=F.cross_entropy, reference="float64")
    assert model[0].weight is attribute
    assert drift.notes == ()
    for name, low, high in (("bf16", 1e-3, 1e-2), ("fp32", 1e-9, 1e-6)):
        assert low < relative_rms(drift[name]["0"].introduced) < high
        assert drift[name]["0"].effect
    recurrent = nn.Sequential(wrap(nn.LSTM(8, 4), "weight_hh_l0")).train(training)

    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output[0], target)

    drift = castwise.compare(recurrent, [(x, target)], FP32, loss=loss, reference="float64")
    assert drift.notes == ()
    assert drift["fp32"]["0"].gradients is not None
    assert drift["fp32"]["0"].introduced_gradients is None  # the weights are computed outside of the module's forward
    assert 1e-9 < relative_rms(drift["fp32"]["0"].introduced) < 1e-6


def test_a_recurrent_layer_keeps_its_weights_in_the_reference_too() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.last = nn.LSTM(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.rnn(x)[0])  # type: ignore[no-any-return]

    model = Recurrent()
    weights = list(model.rnn._flat_weights)
    drift = castwise.compare(model, [batch()], FP32, loss=F.cross_entropy, reference="float64")["fp32"]
    assert 0 < relative_rms(drift["rnn"].total) < 1e-6
    assert all(a is b for a, b in zip(weights, model.rnn._flat_weights, strict=True))


def test_weights_in_bf16_have_a_reference_in_fp32() -> None:
    model = mlp().bfloat16()
    x, target = batch()
    drift = castwise.compare(model, [(x.bfloat16(), target)], {"as it is": Policy("float32")}, loss=F.cross_entropy)
    assert 1e-4 < relative_rms(drift["as it is"]["2"].introduced) < 1e-2
    assert all(param.dtype is torch.bfloat16 for param in model.parameters())


def test_a_frozen_model_has_effects_too() -> None:
    model = mlp()
    expected = castwise.compare(model, [batch()], BF16, loss=F.cross_entropy)["bf16"]
    frozen = castwise.compare(model.requires_grad_(False), [batch()], BF16, loss=F.cross_entropy)["bf16"]
    assert [(each.name, each.effect) for each in frozen.modules] == [
        (each.name, each.effect) for each in expected.modules
    ]
    assert frozen.summary.gradient_cosine is None


def test_a_model_of_torchs_transformer_layers_in_evaluation() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(8, 4)).eval()
    inputs = torch.randn(3, 5, 8), torch.randint(4, (3, 5))
    drift = castwise.compare(model, [inputs], BF16, loss=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
    assert not any(module.problem for module in drift["bf16"].modules)
    assert relative_rms(drift["bf16"]["0.layers.1.self_attn"].introduced) > 0


def test_experts_that_get_other_tokens_are_reported_and_end_nothing() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 2)
            self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x: Tensor) -> Tensor:
            chosen = self.router(x).argmax(-1)
            y = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                mine = (chosen == number).nonzero().flatten()
                y = y.index_add(0, mine, expert(x[mine]).to(y.dtype))
            return y

    torch.manual_seed(0)
    model = Experts()
    with torch.no_grad():
        model.router.weight[1] = model.router.weight[0] * (1 + 1e-4)  # nearly a tie for each token
        model.router.bias.zero_()
    inputs = torch.randn(64, 8), torch.randint(8, (64,))
    drift = castwise.compare(model, [inputs], BF16, loss=F.cross_entropy)
    assert any("other shapes" in note for note in drift.notes)
    assert drift["bf16"].summary.loss > 0


def test_fsdp2_units_are_compared_on_each_rank(tmp_path: Path) -> None:
    found = ranks.run(Path(__file__).with_name("fsdp_worker.py"), 2, tmp_path / "store", "fsdp2")
    for of_rank in found:
        assert of_rank["problems"] == []
        assert of_rank["is_restored"]
        assert of_rank["effects"] == pytest.approx(of_rank["effects_without"])
        assert of_rank["cosine"] > 0.999
        assert "Tune the model before sharding it" in of_rank["tune"]


def test_a_model_in_flattened_shards_is_refused_with_what_to_do(tmp_path: Path) -> None:
    found = ranks.run(Path(__file__).with_name("fsdp_worker.py"), 2, tmp_path / "store", "fsdp1")
    for of_rank in found:
        assert len(of_rank) == 4
        assert {"use fully_shard" in text for text in of_rank} == {True}


def test_what_is_compiled_is_compared_as_its_eager_original() -> None:
    model = mlp()
    expected = castwise.compare(model, [batch()], BF16, loss=F.cross_entropy)
    found = castwise.compare(torch.compile(model), [batch()], BF16, loss=F.cross_entropy)  # type: ignore[arg-type]
    assert found["bf16"].modules == expected["bf16"].modules
    assert found.notes[0] == "compiled modules ran eagerly"


@pytest.mark.parametrize(
    "around", [torch.no_grad, torch.inference_mode, lambda: castwise.autocast("cpu", dtype=torch.bfloat16)]
)
def test_what_the_caller_is_in_changes_no_figure(around: Any) -> None:
    model, both = mlp(), {**BF16, "fp16": policies.fp16}
    expected = castwise.compare(model, [batch()], both, loss=F.cross_entropy)
    with around():
        assert castwise.compare(model, [batch()], both, loss=F.cross_entropy) == expected


# The noise.


def test_samples_one_by_one_have_the_noise_of_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    x, target = torch.randn(4, 8), torch.arange(4)
    drift = castwise.compare(model.eval(), [(x, target)], BF16, loss=F.cross_entropy, vary="batch_size")
    assert drift.noise is not None
    assert drift.noise.summary.relative_loss_error < 1e-5
    assert relative_rms(drift.noise["1"].total) < 1e-5
    in_order = castwise.compare(model.train(), [(x, target)], loss=F.cross_entropy, vary="batch_order")
    assert in_order.policies == {}
    assert in_order.noise is not None
    assert relative_rms(in_order.noise["1"].total) < 1e-5
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):  # of a batch of one
        castwise.compare(model, [(x, target)], loss=F.cross_entropy, vary="batch_size")


@pytest.mark.parametrize("vary", ["batch_size", "batch_order"])
@pytest.mark.parametrize("reference", ["float32", "float64"])
def test_a_module_that_mixes_samples_is_the_first_in_the_noise(vary: Any, reference: Any) -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.1 * x.cumsum(0)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Mixing(), nn.Linear(8, 4))

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 1.0  # type: ignore[no-any-return]

    outer = castwise.compare(Around(), [batch()], loss=F.cross_entropy, vary=vary, reference=reference).noise
    assert outer is not None
    assert outer.modules[0].name == "inner.1"
    assert outer[""].effect == 0.0  # it only multiplies
    drift = castwise.compare(model, [batch()], BF16, loss=F.cross_entropy, vary=vary, reference=reference)
    assert drift.noise is not None
    assert drift.noise.modules[0].name == "1"
    assert relative_rms(drift.noise["0"].total) < 1e-6
    assert relative_rms(drift.noise["2"].introduced) < 1e-6 < relative_rms(drift.noise["2"].carried)
    assert "noise" in str(drift)
    assert drift.noise.summary.gradient_cosine is not None


@pytest.mark.parametrize("vary", ["batch_size", "batch_order"])
def test_samples_that_would_get_other_random_numbers_are_refused(vary: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    with pytest.raises(ValueError, match=rf"vary='{vary}' .* other random numbers from '1': call model.eval\(\)"):
        castwise.compare(model, [batch()], loss=F.cross_entropy, vary=vary)
    assert castwise.compare(model.eval(), [batch()], loss=F.cross_entropy, vary=vary).noise is not None

    def augmented(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0] * random.random()), batch[1])

    with pytest.raises(ValueError, match="other random numbers from the forward"):
        castwise.compare(model, [batch()], forward=augmented, vary=vary)


def test_with_forward_samples_one_by_one_have_the_mean_of_their_losses() -> None:
    model, (x, target) = mlp(), batch()
    drift = castwise.compare(
        model, [(x, target)], vary="batch_size", forward=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    )
    assert drift.noise is not None
    assert drift.noise.summary.loss == pytest.approx(drift.noise.summary.reference_loss, rel=1e-6)


# fp16.


def test_small_gradients_in_fp16_are_scaled_as_in_training() -> None:
    model, (x, target) = mlp(), batch()
    drift = castwise.compare(
        model, [(x, target)], {"fp16": policies.fp16}, loss=lambda y, t: F.cross_entropy(y, t) * 1e-6
    )
    summary = drift["fp16"].summary
    assert summary.loss_scale == 2.0**16
    assert summary.gradient_cosine is not None
    assert summary.gradient_cosine > 0.999
    large = castwise.compare(
        model, [(x, target)], {"fp16": policies.fp16}, loss=lambda y, t: F.cross_entropy(y, t) * 1e3
    )
    assert large["fp16"].summary.loss_scale < 2.0**16
    assert large["fp16"].summary.gradient_cosine is not None
    assert large["fp16"].summary.gradient_cosine > 0.999


def test_an_overflow_is_an_infinite_effect_and_comes_first() -> None:
    model, (x, target) = mlp(), batch()
    with torch.no_grad():
        model[0].weight.mul_(1e6)
    drift = castwise.compare(model, [(x, target)], {"fp16": policies.fp16}, loss=F.cross_entropy)["fp16"]
    assert drift.modules[0].name == "0"
    assert drift.modules[0].effect == math.inf
    introduced = drift.modules[0].introduced
    assert introduced is not None
    assert introduced.nonfinite > 0.5
    assert (
        castwise.compare(model, [(x, target)], {"fp16": policies.fp16}, loss=F.cross_entropy).as_dict()["policies"][
            "fp16"
        ]["modules"][0]["effect"]
        == "inf"
    )


def test_what_makes_a_loss_or_gradients_that_are_not_finite_is_named() -> None:
    model, (x, target) = mlp(), batch()
    fp16 = {"fp16": policies.fp16}
    with torch.no_grad():
        model[2].weight.mul_(1e6)

    drift = castwise.compare(model, [(x, target)], fp16, loss=F.cross_entropy)
    assert "2 (Linear) produces non-finite values from finite inputs" in drift["fp16"].failure
    assert f"fp16: {drift['fp16'].failure}" in drift.notes

    def infinite(output: Tensor, target: Tensor) -> Tensor:
        return output.sum() * (1.0 if output.dtype is torch.float32 else math.inf)

    drift = castwise.compare(mlp(), [(x, target)], fp16, loss=infinite)
    assert "so it comes from the loss function" in drift["fp16"].failure
    drift = castwise.compare(mlp(), [(x, target)], fp16, loss=lambda y, t: (y.float() * 1e9).sum())
    assert "its gradients are not finite, though the loss scale is only 1" in drift["fp16"].failure


# Everything is put back.


class State:
    """All of a model that a comparison may not change."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self._model, self._inputs = model, inputs
        self._tensors = {name: (id(each), each.clone()) for name, each in self._named()}
        self._rest = self._other()

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self._model.named_parameters():
            yield name, param
            if param.grad is not None:
                yield f"{name}.grad", param.grad
        yield from self._model.named_buffers()
        yield from ((f"inputs {place}", tensor) for place, tensor in enumerate(self._inputs))

    def _other(self) -> Any:
        modules = [
            (each.training, dict(vars(each)).get("forward"), len(each._forward_hooks), len(each._forward_pre_hooks))
            for each in self._model.modules()
        ]
        hooks = [dict(param._backward_hooks or {}) for param in self._model.parameters()]
        return modules, hooks, torch.get_rng_state().tolist(), random.getstate(), torch.is_grad_enabled()

    def check(self) -> None:
        now = dict(self._named())
        assert now.keys() == self._tensors.keys()
        for name, (identity, before) in self._tensors.items():
            assert id(now[name]) == identity, name
            assert torch.equal(now[name], before), name
        assert self._other() == self._rest


class Changing(nn.Module):
    """Writes to whatever it can reach, and raises on request."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5 * draws)
        self.last, self.scale, self.draws = nn.Linear(8, 4), nn.Identity(), draws
        self.register_buffer("count", torch.zeros(()))
        self.error: Callable[[], BaseException] | None = None
        self.calls, self.fail_at = 0, -1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fail_at and self.error is not None:
            raise self.error()
        self.count = self.count + (random.random() if self.draws else 1.0)
        self.first.weight.data.mul_(1.01)
        self.train(not self.training) if self.calls % 2 else None
        self.scale(self.norm.weight)
        return self.last(self.drop(self.norm(self.first(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("vary", [None, "batch_order"])
@pytest.mark.parametrize("reference", ["float32", "float64"])
@pytest.mark.parametrize("fail_at", [-1, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_everything_is_put_back(reference: Any, fail_at: int, error: type[BaseException], vary: Any) -> None:
    torch.manual_seed(0)
    model, (x, target) = Changing(draws=vary is None), batch()
    F.cross_entropy(model(x), target).backward()
    model.fail_at, model.error = fail_at + model.calls if fail_at > 0 else -1, lambda: error("planted")
    state = State(model, [x, target])
    policy = Policy(compute="bfloat16", modules={"last": "float32"})

    def run() -> Drift:
        return castwise.compare(
            model, [(x, target)] * 2, {"p": policy}, loss=F.cross_entropy, reference=reference, vary=vary
        )

    with contextlib.suppress(error):  # what a module raises where it is called again by itself is a note
        run()
    state.check()


def test_two_comparisons_of_one_model_have_the_same_figures() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    first, second = (castwise.compare(model, [batch()], BF16, loss=F.cross_entropy) for _ in range(2))
    assert first == second


# What cannot be done.


def test_bad_input_is_refused_with_what_to_do() -> None:
    model, one = mlp(), batch()
    compare: Any = castwise.compare
    with pytest.raises(TypeError, match=r"batches\[0\] must be \(inputs, targets\), got Tensor: .* give forward="):
        compare(model, [one[0]], BF16, loss=mse)
    with pytest.raises(TypeError, match=r"run more than once, got generator: give list\(batches\)"):
        compare(model, (each for each in [one]), BF16, loss=mse)
    with pytest.raises(ValueError, match="at least one batch, got none"):
        compare(model, [], BF16, loss=mse)
    with pytest.raises(ValueError, match="at least one policy, got none"):
        compare(model, [one], {}, loss=mse)
    with pytest.raises(TypeError, match=r'policies must be a mapping such as {"bf16": policy}, got Policy'):
        compare(model, [one], policies.bf16, loss=mse)
    with pytest.raises(TypeError, match=r"policies\['a'\] must be a castwise.Policy, bound or not, got str"):
        compare(model, [one], {"a": "bf16"}, loss=mse)
    with pytest.raises(TypeError, match="give either loss="):
        compare(model, [one], BF16)
    with pytest.raises(ValueError, match="got 'float46'; did you mean 'float64'"):
        compare(model, [one], BF16, loss=mse, reference="float46")
    with pytest.raises(ValueError, match="vary must be one of 'batch_size', 'batch_order', or None, got 'batch_sizes'"):
        compare(model, [one], BF16, loss=mse, vary="batch_sizes")
    with pytest.raises(ValueError, match=r"clip_band must be two ratios, 0 <= low < high, got \(2, 1\)"):
        compare(model, [one], BF16, loss=mse, clip_band=(2, 1))
    with pytest.raises(TypeError, match="loss must return the loss as a tensor, got float"):
        compare(model, [one], BF16, loss=lambda y, t: 1.0)
    with pytest.raises(ValueError, match=r"one element, got shape \(6, 4\)"):
        compare(model, [one], BF16, loss=lambda y, t: y)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got function"):
        compare(mse, [one], BF16, loss=mse)


def test_a_module_that_returns_a_generator_is_refused_by_name() -> None:
    class Generating(nn.Module):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            yield x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Generating(), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(next(self.inner(x)))  # type: ignore[no-any-return]

    with pytest.raises(TypeError, match="module 'inner' returns a generator, which can be read only once"):
        castwise.compare(Model(), [batch()], BF16, loss=F.cross_entropy)


def test_a_reference_that_is_not_finite_is_diagnosed() -> None:
    model, one = mlp(), batch()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"the loss of batches\[0\] is nan in the reference(.|\n)*2.weight is nan at"):
        castwise.compare(model, [one], BF16, loss=F.cross_entropy)


def test_a_reference_that_is_not_finite_is_diagnosed_with_a_forward_too() -> None:
    model, one = mlp(), batch()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with pytest.raises(
        ValueError, match=r"the loss of batches\[0\] is nan in the reference(.|\n)*model.2.weight is nan at"
    ):
        castwise.compare(model, [one], BF16, forward=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))


# Faults.


@pytest.mark.parametrize("seed", range(24))
def test_a_planted_fault_is_named_first(seed: int) -> None:
    case = planted.case(seed)
    drift = castwise.compare(case.model, [case.batch], {"p": case.policy}, loss=case.loss, gradients=False)["p"]
    assert planted.is_named(case.culprit, drift.modules[0].name)


def test_tables_and_plain_data_say_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    x, target = batch()
    drift = castwise.compare(model, [(x, target)], BF16, loss=F.cross_entropy, vary="batch_size")
    text = str(drift)
    assert "bf16: modules by effect on the loss" in text
    assert "and 6 more modules: drift['bf16'].modules" in text
    record = drift.as_dict()
    assert record["reference"] == "float32"
    assert record["batches"] == 1
    modules = record["policies"]["bf16"]["modules"]
    assert [module["name"] for module in modules] == [module.name for module in drift["bf16"].modules]
    assert modules[0]["introduced"]["relative_rms"] == relative_rms(drift["bf16"].modules[0].introduced)
    assert record["policies"]["bf16"]["policy"]["compute"] == "bfloat16"
    assert record["noise"]["policy"] is None
    with pytest.raises(KeyError, match="nothing"):
        drift["bf16"]["nothing"]


@dataclasses.dataclass
class Output:
    hidden: Tensor
    states: tuple[Tensor, ...] = ()


def test_outputs_in_a_dataclass_have_the_figures_of_those_in_a_dict() -> None:
    class Layer(nn.Module):
        def __init__(self, kind: Callable[..., Any]) -> None:
            super().__init__()
            self.weight, self.kind = nn.Parameter(torch.eye(8)), kind

        def forward(self, x: Tensor) -> Any:
            return self.kind(hidden=x @ self.weight)

    class Model(nn.Module):
        def __init__(self, kind: Callable[..., Any]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.head = Layer(kind), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            output = self.layer(x)
            return self.head(output["hidden"] if isinstance(output, dict) else output.hidden)

    found = [castwise.compare(Model(kind), [batch()], BF16, loss=F.cross_entropy)["bf16"] for kind in (dict, Output)]
    assert found[0]["layer"].effect != 0.0
    assert found[1].modules == found[0].modules


def test_printed_are_the_reference_with_its_loss_and_what_was_not_called() -> None:
    x, target = batch()
    inputs = {"x": x, "mask": torch.ones(8)}
    drift = castwise.compare(
        Nested(), [(inputs, target)], BF16, loss=lambda out, target: mse(out["logits"].sum(1), target)
    )
    loss = drift["bf16"].summary.reference_loss
    assert str(drift).startswith(f"against float32, whose loss is {loss:.6g}, over 1 batch\n")
    assert "never called: unused" in str(drift)


# What cannot be run or known.


class RefusesHalf(nn.Module):
    """A layer without a kernel for fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.dtype is torch.float16:
            raise ValueError("no kernel for Half")
        return self.last(hidden)  # type: ignore[no-any-return]


def test_a_policy_that_cannot_run_leaves_the_results_of_others() -> None:
    given: dict[str, Any] = {"fp16": policies.fp16, **BF16}
    model = RefusesHalf()
    drift = castwise.compare(model, [batch(), batch()], given, loss=F.cross_entropy)
    assert drift["fp16"].problem == "cannot be run: ValueError: no kernel for Half"
    assert math.isnan(drift["fp16"].summary.loss)
    assert drift["fp16"].modules == ()
    assert "note: fp16: cannot be run: ValueError: no kernel for Half" in str(drift)
    assert "fp16    cannot be run" in str(drift)
    assert drift.as_dict()["policies"]["fp16"]["failure"] == drift["fp16"].problem
    alone = castwise.compare(model, [batch(), batch()], BF16, loss=F.cross_entropy)
    assert drift["bf16"] == alone["bf16"]
    assert drift["bf16"].failure == ""
    with pytest.raises(ValueError, match="no kernel for Half"):
        castwise.compare(model, [batch()], {"fp16": policies.fp16}, loss=F.cross_entropy)


def test_running_out_of_memory_is_no_problem_of_a_policy() -> None:
    class Full(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += x.dtype is torch.bfloat16
            if self.calls == 2:  # when it is called again by itself
                raise MemoryError
            return x.float()

    given = {"fp32": Policy(compute="float32"), **BF16}
    with pytest.raises(MemoryError):
        castwise.compare(
            nn.Sequential(nn.Linear(8, 4), Full()), [batch()], given, loss=F.cross_entropy, gradients=False
        )


def test_a_policy_with_rules_that_is_bound_to_another_model_is_refused() -> None:
    bound = Policy(compute="bfloat16", modules={"2": "float32"}).bind(mlp())
    with pytest.raises(ValueError, match=r"policies\['p'\] is bound to another model: give its policy"):
        castwise.compare(mlp(), [batch()], {"p": bound}, loss=F.cross_entropy)


def test_the_effect_of_a_module_that_runs_without_gradients_is_not_known() -> None:
    policy = Policy(compute="bfloat16", modules={"encoder": "float32"})
    drift = castwise.compare(planted.FrozenEncoder(), [batch()], {**BF16, "fp32": policy}, loss=F.cross_entropy)
    assert drift["bf16"]["encoder"].effect is None
    assert drift["bf16"]["encoder"].loss_shift is None
    assert relative_rms(drift["bf16"]["encoder"].introduced) > 0
    assert drift["fp32"]["encoder"].effect == 0.0  # it has no errors
    assert "bf16: encoder runs under torch.no_grad(), so its effect is unknown" in drift.notes


def test_effects_on_a_loss_without_a_gradient_are_not_known() -> None:
    drift = castwise.compare(mlp(), [batch()], BF16, loss=lambda out, target: F.cross_entropy(out, target).detach())
    assert {module.effect for module in drift["bf16"].modules} == {None}
    assert drift.notes == ("the loss has no gradient, so effects are unknown",)


def test_the_loss_scale_is_the_least_that_a_batch_has_needed() -> None:
    model, (x, target) = nn.Linear(8, 1, bias=False), batch()
    fp16 = {"fp16": policies.fp16}
    batches = [(x * size, target) for size in (3e4, 1.0)]  # the first overflows with any scale but 1
    nn.init.ones_(model.weight)
    found = [
        castwise.compare(model, each, fp16, loss=lambda out, target: out.float().sum())["fp16"].summary.loss_scale
        for each in (batches[:1], batches[1:], batches)
    ]
    assert found[0] < found[1]
    assert found[2] == found[0]


def test_the_noise_of_a_loss_that_the_model_returns_is_that_of_its_mean() -> None:
    class ReturnsLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.layer(x), labels)}

    x, target = batch()
    drift = castwise.compare(
        ReturnsLoss(), [({"x": x, "labels": target}, None)], loss=lambda out, _: out["loss"], vary="batch_size"
    )
    assert drift.noise is not None
    assert drift.noise.summary.relative_loss_error < 1e-6
    assert drift.notes == ()


def test_a_loss_that_is_no_mean_over_samples_is_noted_beside_the_noise() -> None:
    def total(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    drift = castwise.compare(mlp(), [batch()], forward=total, vary="batch_size")
    assert "the loss of a batch is not the mean of the losses of its samples" in drift.notes[0]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"loss": "mse"}, TypeError, "loss must be a function that returns the loss as a tensor, got 'mse'"),
        ({"clip_band": 0.2}, TypeError, r"clip_band must be two ratios such as \(0.8, 1.2\), got 0.2"),
        ({"clip_band": ("a", "b")}, TypeError, "clip_band must be two ratios"),
        ({"clip_band": (1.2, 0.8)}, ValueError, "clip_band must be two ratios, 0 <= low < high"),
        ({"reference": ["float32"]}, ValueError, r"reference must be one of .*, or a policy, got \['float32'\]"),
    ],
)
def test_options_of_a_wrong_type_are_refused_with_what_is_allowed(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        castwise.compare(mlp(), [batch()], BF16, **{"loss": F.cross_entropy, **options})


def test_a_small_error_after_a_large_one_has_its_effect() -> None:
    class CalledTwice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(8, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            large = self.layer(x * 1e12).float() * 1e-30
            return self.head(large + self.layer(x * 1e-3))

    torch.manual_seed(0)
    drift = castwise.compare(CalledTwice(), [batch()], BF16, loss=F.cross_entropy, gradients=False)
    effect = drift["bf16"]["layer"].effect
    assert effect is not None
    assert effect > 1e-6  # of the second call: that of the first is 1e-22


def test_an_effect_whose_gradient_is_not_finite_in_the_reference_is_not_known() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.head((y * (y > 0)).sqrt())  # 0 * inf in the backward

    torch.manual_seed(0)
    drift = castwise.compare(Root(), [batch()], BF16, loss=F.cross_entropy)
    assert drift["bf16"]["first"].effect is None
    assert drift["bf16"].modules[0].name == "head"
    assert "bf16: first gets a non-finite gradient in the reference, so its effect is unknown" in drift.notes


@pytest.mark.parametrize("gradients", [True, False])
def test_small_gradients_of_a_reference_in_fp16_are_scaled_as_in_training(gradients: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1000))
    batches = [(torch.randn(4096, 8), torch.randint(1000, (4096,)))]  # gradients of logits are about 2e-7

    def found(policy: Policy, reference: Any) -> castwise.comparison.PolicyDrift:
        return castwise.compare(
            model, batches, {"it": policy}, loss=F.cross_entropy, reference=reference, gradients=gradients
        )["it"]

    there, back = found(policies.fp16, FP32["fp32"]), found(FP32["fp32"], policies.fp16)
    for module in there.modules:
        assert back[module.name].effect == pytest.approx(module.effect, rel=0.05)
    if not gradients:
        return
    assert back.summary.gradient_cosine == pytest.approx(1.0, abs=1e-4)
    assert back.summary.gradient_norm_ratio == pytest.approx(1.0, abs=1e-3)
    for name in ("0", "2"):
        assert relative_rms(back[name].gradients) == pytest.approx(relative_rms(there[name].gradients), rel=0.1)
        introduced = relative_rms(there[name].introduced_gradients)
        assert relative_rms(back[name].introduced_gradients) == pytest.approx(introduced, rel=0.2)


@pytest.mark.parametrize("vary", ["batch_size", "batch_order"])
@pytest.mark.parametrize("positions", [4, 6])  # 6 is the number of samples, too
def test_the_noise_of_what_has_no_samples_first_is_none_that_another_order_makes(vary: Any, positions: int) -> None:
    class Flattening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.flat, self.head = nn.Embedding(positions, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = x.unsqueeze(1) + self.places(torch.arange(positions))
            return self.head(self.flat(y.flatten(0, 1)).view(y.shape).mean(1))

    torch.manual_seed(0)
    noise = castwise.compare(Flattening(), [batch()], loss=F.cross_entropy, vary=vary).noise
    assert noise is not None
    assert relative_rms(noise["places"].total) == 0.0
    assert relative_rms(noise["head"].total) < 1e-6
    assert noise["flat"].total is None
    assert "shapes" in noise["flat"].problem or "first dimension is not the samples" in noise["flat"].problem


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"policies": {1: policies.bf16}}, TypeError, "names of policies must be strings, got 1"),
        (
            {"policies": {"batch_size": policies.bf16}},
            ValueError,
            "policies['batch_size'] has the name of the noise of vary='batch_size': rename it",
        ),
        ({"batches": [(torch.ones(0, 8), torch.ones(0, 4))]}, ValueError, "vary needs batches of samples, got one "),
    ],
)
def test_names_and_batches_without_a_figure_are_refused(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    arguments: dict[str, Any] = {"batches": [batch()], "policies": BF16, "vary": "batch_size", **changes}
    with pytest.raises(error, match=re.escape(text)):
        castwise.compare(mlp(), loss=lambda out, target: out.sum(), **arguments)


class Spectrum(nn.Module):
    """Multiplies the spectrum of what its matrix product in the region's dtype makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.filter = (
            nn.Parameter(torch.randn(8, 8)),
            nn.Parameter(torch.randn(5, dtype=torch.complex64)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return torch.fft.rfft(y if y.dtype is torch.float64 else y.float()) * self.filter


class Filtered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum, self.head = Spectrum(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(self.spectrum(x), n=8))


@pytest.mark.filterwarnings("error:Casting complex values")
def test_complex_numbers_count_as_their_real_and_imaginary_parts() -> None:
    torch.manual_seed(0)
    model, (x, target) = Filtered(), batch()
    drift = castwise.compare(model, [(x, target)], BF16, loss=F.cross_entropy)["bf16"]

    spectrum = model.spectrum(x)
    loss = F.cross_entropy(model.head(torch.fft.irfft(spectrum, n=8)), target)
    gradient, of_filter = torch.autograd.grad(loss, [spectrum, model.spectrum.filter])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.spectrum(x)
        loss = F.cross_entropy(model(x), target)
    error = torch.view_as_real(rounded - spectrum)
    found = drift["spectrum"]
    assert found.effect == pytest.approx(rms(torch.view_as_real(gradient) * error), rel=1e-4)
    assert relative_rms(found.introduced) == pytest.approx(float(error.norm() / spectrum.norm()), rel=1e-4)
    off = torch.autograd.grad(loss, [model.spectrum.filter, model.spectrum.weight])
    of_weight = torch.autograd.grad(F.cross_entropy(model(x), target), [model.spectrum.weight])[0]
    squares = (off[0] - of_filter).abs().square().sum() + (off[1] - of_weight).square().sum()
    size = of_filter.abs().square().sum() + of_weight.square().sum()
    assert relative_rms(found.gradients) == pytest.approx(float((squares / size).sqrt()), rel=1e-3)

    wide = castwise.compare(model, [(x, target)], BF16, loss=F.cross_entropy, reference="float64")["bf16"]
    assert wide["spectrum"].effect == pytest.approx(found.effect, rel=0.01)
    assert wide["spectrum"].problem == ""
    assert model.spectrum.filter.dtype is torch.complex64


class Forces(nn.Module):
    """Energies and forces, which are gradients of energies, as in models of molecules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = self.last(torch.tanh(self.first(x))).float().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_model_that_computes_gradients_in_its_forward_is_compared(requires_grad: bool) -> None:
    torch.manual_seed(0)
    model, x = Forces(), batch()[0].requires_grad_(requires_grad)
    target = torch.randn(x.shape)
    drift = castwise.compare(model, [(x, target)], BF16, loss=F.mse_loss)["bf16"]
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(model(x), target)
    assert drift.summary.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert not drift.problem
    assert drift["first"].problem == ""
    assert 0 < relative_rms(drift["first"].introduced) < 0.01
    assert drift["first"].effect
    assert x.requires_grad is requires_grad
    assert x.grad is None
    best = castwise.tune(model, [(x, target)] * 2, loss=F.mse_loss, formats=("bfloat16", "float32"))
    assert best.is_within_tolerance


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_what_torch_jit_has_compiled_has_a_summary_and_a_note() -> None:
    model, plain = mlp(), mlp()
    scripted: Any = torch.jit.script(model)
    drift = castwise.compare(scripted, [batch()], BF16, loss=F.cross_entropy)
    expected = castwise.compare(plain, [batch()], BF16, loss=F.cross_entropy)
    assert drift["bf16"].summary.reference_loss == pytest.approx(expected["bf16"].summary.reference_loss)
    assert drift["bf16"].summary.relative_loss_error > 0
    assert drift["bf16"].modules == ()
    assert "(root), 0, 1, 2: compiled by torch.jit, so without separate figures" in drift.notes
