"""Compiled models and other callables beside policies: which is closer to float64, and in which module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.report.test_report import Page
from torch import Tensor, nn

import castwise

LOSS = nn.functional.mse_loss


class Compiler:
    """A backend that rounds the outputs of each graph to bf16."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return lambda *args: [value.bfloat16().to(value.dtype) for value in graph(*args)]


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    torch._dynamo.reset()
    yield Compiler()
    torch._dynamo.reset()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Sequential(nn.Linear(16, 4)))


@pytest.fixture
def batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(5, 8), torch.randn(5, 4)) for _ in range(2)]


def test_a_compiled_model_runs_compiled_beside_the_eager_one_and_module_by_module(
    model: nn.Module, batches: Any, compiler: Compiler, tmp_path: Path
) -> None:
    drift = castwise.compare(model, batches, {"compiled": torch.compile(model, backend=compiler)}, loss=LOSS)
    assert (drift.reference, [*drift.policies]) == ("float64", ["eager", "compiled"])
    eager, compiled = drift
    assert compiled.summary.relative_loss_error > 100 * eager.summary.relative_loss_error
    assert eager.summary.gradient_errors is not None
    assert compiled.summary.gradient_errors is not None
    assert compiled.summary.gradient_errors.relative_rms > 100 * eager.summary.gradient_errors.relative_rms
    assert [(each.name, each.type) for each in compiled.alone] == [
        ("0", "Linear"),
        ("1", "GELU"),
        ("2", "Sequential"),
        ("2.0", "Linear"),
    ]
    for each in compiled.alone:
        assert each.compiled is not None
        assert each.eager is not None
        assert 1e-4 < each.compiled.relative_rms < 1e-2
        assert each.eager.relative_rms < 1e-6
    assert compiler.graphs == 1 + 4, "the model for training, and its modules"
    assert eager.alone == ()
    pytest.importorskip("plotly")
    growth, worst = max((each.compiled.relative_rms / each.eager.relative_rms, each.name) for each in compiled.alone)
    page = Page(drift.report(tmp_path / "drift.html"))
    assert f"worst compiled by itself: {worst}, {growth:.3g} times the error of eager" in page.text
    assert "#alone" in [attributes.get("href") for _, attributes in page.tags]
    text = str(drift)
    assert "compiled: each module compiled by itself, errors relative to float64" in text
    assert "compiled: its gradients are farther from the reference than those of the eager model" in text
    assert "never called" not in text
    assert drift.as_dict()["policies"]["compiled"]["alone"][0]["name"] == "0"
    pytest.importorskip("pandas")
    columns = ["policy", "module", "type", "total"]
    assert drift.frame()[columns].iloc[0].tolist() == [
        "compiled",
        "0",
        "Linear",
        compiled.alone[0].compiled.relative_rms,
    ]


def test_what_is_compiled_with_the_default_settings_keeps_them(
    model: nn.Module, batches: Any, compiler: Compiler
) -> None:
    function = torch.compile(lambda x: model(x), backend="eager")
    drift = castwise.compare(model, batches[:1], {"compiled": function}, loss=LOSS)
    assert drift["compiled"].summary.relative_loss_error == drift["eager"].summary.relative_loss_error


def test_the_eager_model_is_eager_where_parts_of_it_are_compiled(
    model: nn.Module, batches: Any, compiler: Compiler
) -> None:
    model[2].compile(backend=compiler)
    drift = castwise.compare(model, batches[:1], {"twice": lambda x: 2 * x[:, :4]}, loss=LOSS)
    assert compiler.graphs == 0
    assert drift["eager"].summary.relative_loss_error < 1e-6


def test_any_callable_is_called_instead_of_the_model(model: nn.Module, batches: Any) -> None:
    calls = {"eager": lambda x: model(x), "scaled": lambda x: model(x) * 1.01}
    drift = castwise.compare(model, batches, calls, loss=LOSS)
    assert [*drift.policies] == ["eager", "scaled"]
    assert drift["scaled"].alone == ()
    assert drift["scaled"].summary.relative_loss_error > 10 * drift["eager"].summary.relative_loss_error
    errors = drift["scaled"].summary.output_errors, drift["eager"].summary.output_errors
    assert errors[0] is not None
    assert errors[1] is not None
    assert errors[0].relative_rms == pytest.approx(0.01, rel=1e-5)  # rounded as fp32 numbers are
    assert 0 < errors[1].relative_rms < 1e-6
    head, *rows = drift.summary_rows()
    assert [row[head.index("output error")] for row in rows] == [f"{errors[1].relative_rms:.2e}", "1.00e-02"]


def test_callables_and_policies_are_compared_with_one_reference(model: nn.Module, batches: Any, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    kinds = {"same": lambda x: model(x), "bf16": castwise.policies.bf16}
    drift = castwise.compare(model.eval(), batches, kinds, loss=LOSS, vary="batch_size")
    assert [*drift.policies] == ["bf16", "eager", "same"]
    assert drift["same"].summary == drift["eager"].summary
    assert drift["bf16"].modules
    assert drift.noise is not None
    text = Page(drift.report(tmp_path / "drift.html")).text
    assert text.count("eager and same are closest to float64\n") == 2  # title and heading
    assert "eager and same run without hooks inside, so there is no column for them." in text
    assert text.count("outputs off by under 0.0001%") == 2
    for policy_drift in drift:
        assert f"{policy_drift.name} changes the loss by{policy_drift.summary.loss_error:.2g}" in text
    assert castwise.compare(model, batches, {"bf16": castwise.policies.bf16}, loss=LOSS).reference == "float32"


def test_losses_of_ones_own_are_called_with_the_callable(model: nn.Module, batches: Any) -> None:
    drift = castwise.compare(
        model, batches, {"half": lambda x: model(x) / 2}, forward=lambda call, batch: LOSS(call(batch[0]), batch[1])
    )
    assert drift["half"].summary.loss != drift["eager"].summary.loss
    assert drift["half"].summary.output_errors is None
    assert "output error" not in drift.summary_rows()[0]


def test_gradients_that_a_callable_does_not_give_are_not_known(model: nn.Module, batches: Any) -> None:
    calls = {
        "detached": lambda x: model(x).detach(),
        "other": lambda x: model(x).detach() * torch.ones(4).requires_grad_(),
    }
    drift = castwise.compare(model, batches, calls, loss=LOSS)
    for name in calls:
        summary = drift[name].summary
        assert (summary.gradient_errors, summary.gradient_cosine, drift[name].failure) == (None, None, "")
        assert f"{name}: its loss has no gradient with respect to the model's weights" in str(drift.notes)
    assert "gradients by under 0.0001% (not known for detached and other)" in drift.result()
    assert "farther" not in str(drift)
    last = batches[-1][0]
    some = castwise.compare(
        model, batches, {"some": lambda x: model(x).detach() if torch.equal(x, last) else model(x)}, loss=LOSS
    )
    assert some["some"].summary.gradient_errors is not None
    assert "some: its loss has no gradient" not in str(some.notes)


def test_a_callable_whose_output_is_not_finite_is_blamed_and_not_the_loss(model: nn.Module, batches: Any) -> None:
    calls = {"nan": lambda x: model(x) * torch.nan, "one": lambda x: model(x) + torch.tensor([torch.inf, 0, 0, 0])}
    drift = castwise.compare(model, batches, calls, loss=LOSS)
    assert drift["nan"].failure == "its loss is nan: 100% of its output is not finite"
    assert drift["one"].failure == "its loss is inf: 25% of its output is not finite"
    assert not any("its gradients are" in note for note in drift.notes if note.startswith("nan"))

    def infinite(output: Tensor, target: Tensor) -> Tensor:
        return LOSS(output, target) / (output.dtype is torch.float64)  # the reference

    drift = castwise.compare(model, batches, {"same": lambda x: model(x)}, loss=infinite)
    assert drift["same"].failure == "its loss is inf: its output is finite, so it comes from the loss function"
    drift = castwise.compare(
        model, batches, {"nan": lambda x: model(x) * torch.nan}, forward=lambda call, batch: call(batch[0]).sum()
    )
    assert drift["nan"].failure == "its loss is nan"


def test_a_callable_that_fails_is_noted(model: nn.Module, batches: Any) -> None:
    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("no kernel")

    drift = castwise.compare(model, batches, {"broken": fail}, loss=LOSS)
    assert drift["broken"].problem == "cannot be run: RuntimeError: no kernel"
    assert not drift["eager"].problem


def test_a_module_that_cannot_be_compiled_is_named(model: nn.Module, batches: Any, compiler: Compiler) -> None:
    def refuses(graph: Any, inputs: Any) -> Any:
        if len(inputs) == 1:  # the GELU
            raise RuntimeError("no activations")
        return compiler(graph, inputs)

    drift = castwise.compare(model, batches[:1], {"compiled": torch.compile(model, backend=refuses)}, loss=LOSS)
    failed = [each for each in drift["compiled"].alone if each.problem]
    assert [each.name for each in failed] == ["1"]
    assert "1 module could not be compared, the first 1: " in str(drift)


def test_nothing_of_the_model_changes(model: nn.Module, batches: Any, compiler: Compiler) -> None:
    model.append(nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    castwise.compare(model, batches, {"compiled": torch.compile(model, backend=compiler)}, loss=LOSS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(param.grad is None for param in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())
