"""`tune` with recipes of 8 and 4 bits among its formats."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import castwise
from castwise.policy._module_rules import decide
from castwise.tuning import _costs as costs
from castwise.tuning import _precision_search as precision_search


def case() -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64), nn.Linear(64, 10))
    return model, [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(4)]


def tuned(**options: Any) -> castwise.tuning.Tuned:
    model, batches = case()
    return castwise.tune(model, batches, loss=cross_entropy, **options)


def test_layers_that_take_a_recipe_get_it_and_others_do_not() -> None:
    model, _ = case()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that it is emulated is in the notes
        best = tuned(formats=("bfloat16", "float32", "float8_rowwise", "nvfp4"), tolerance=0.05)
    recipes = {each.name: each.recipe for each in decide(best.policy, model)}
    assert recipes == {"": None, "0": "nvfp4", "1": None, "2": None, "3": "nvfp4", "4": None}
    assert best.formats == {"0": "nvfp4", "3": "nvfp4", "4": "bfloat16"}
    macs = {"0": 64 * 128, "3": 128 * 64, "4": 64 * 10}
    expected = (macs["0"] / 8 + macs["3"] / 8 + macs["4"] / 2) / sum(macs.values())
    assert best.cost == pytest.approx(expected)
    assert "nvfp4: nvfp4 is emulated" in best.notes


def test_a_tight_tolerance_keeps_layers_out_of_recipes() -> None:
    best = tuned(formats=("bfloat16", "float32", "nvfp4"), tolerance=1e-4)
    assert best.is_within_tolerance
    assert "nvfp4" not in best.formats.values()


def test_bytes_of_quantized_weights_are_counted() -> None:
    best = tuned(formats=("bfloat16", "mxfp8"), tolerance=0.05, cost="bytes")
    by_format = {point.policy: point.cost for point in best.frontier.points}
    assert best.formats["0"] == "mxfp8"
    assert best.cost == min(by_format.values())
    assert costs.bytes_of_weight("nvfp4") == 0.5
    assert costs.bytes_of_weight("mxfp8") == 1.0


def test_a_recipe_that_is_slower_here_is_said_not_to_be_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(watch: Any, calls: Any, device: str, precisions: dict[str, Any]) -> costs.Costs:
        recipe, around = precisions
        return {call.tap: {recipe: seconds, around: 1.0} for call in calls}

    monkeypatch.setattr(precision_search.costs, "measured", measured)
    for seconds, words in ((4.0, "is not worth it on this machine"), (0.5, "is faster on this machine")):
        best = tuned(formats=("bfloat16", "mxfp8"), tolerance=0.05)
        note = f"mxfp8 (emulated) {words}: a forward of its 2 layers takes {seconds:.2g} times as long as in bfloat16"
        assert best.notes[-1] == note


def test_a_measured_cost_leaves_recipes_out_where_they_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ops(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    def launches(run: Callable[[], object], device: str) -> float:
        """Instead of seconds, which for layers as small as these depend on what else runs."""
        with Ops() as ops:
            run()
        return float(ops.count)

    monkeypatch.setattr(costs, "_seconds", launches)
    best = tuned(formats=("bfloat16", "float8_rowwise"), tolerance=0.05, cost="measured")
    assert "float8_rowwise" not in best.formats.values()


def test_formats_need_one_for_what_takes_no_recipe() -> None:
    with pytest.raises(ValueError, match=r"formats must include one of 'float16', 'bfloat16', 'float32' for modules "):
        tuned(formats=("mxfp8",))
    with pytest.raises(ValueError, match="got 'mxfp6'; did you mean 'mxfp8'"):
        tuned(formats=("bfloat16", "mxfp6"))


def test_a_model_without_layers_for_a_recipe_is_tuned_without_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(24, 3))
    batches = [(torch.randn(4, 2, 8), torch.randint(3, (4,))) for _ in range(4)]
    best = castwise.tune(model, batches, loss=cross_entropy, formats=("bfloat16", "mxfp8"), tolerance=0.05)
    assert set(best.formats.values()) == {"bfloat16"}


def test_compare_says_what_a_recipe_does_to_each_layer() -> None:
    model, batches = case()
    rules = {"0": "nvfp4", "3": "float8_rowwise"}
    policies = {"recipes": castwise.Policy("bfloat16", rules), "bf16": castwise.Policy("bfloat16")}
    drift = castwise.compare(model, batches, policies, loss=cross_entropy)
    errors = {name: {each.name: each.introduced.relative_rms for each in drift[name].modules} for name in policies}
    for layer, at_least in (("0", 10), ("3", 3)):
        assert errors["recipes"][layer] > at_least * errors["bf16"][layer]
    assert errors["recipes"]["4"] == pytest.approx(errors["bf16"]["4"], rel=0.5)
    assert "recipes: nvfp4 is emulated" in drift.notes
    computes_in = {module.name: module.computes_in for module in drift["recipes"].modules}
    assert (computes_in["0"], computes_in["3"], computes_in["4"]) == ("nvfp4", "float8_rowwise", "bfloat16")
    assert re.search(r"^0 +Linear +nvfp4 ", str(drift), re.MULTILINE)


class Branching(nn.Module):
    """Its large layer runs for positive batches alone; the others are too narrow for any recipe."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.wide, self.head = nn.Linear(32, 12), nn.Linear(32, 64), nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.stem(x)
        if x.mean() > 1:
            hidden = hidden + self.wide(x).mean()
        return self.head(hidden)


def test_the_speed_of_a_layer_that_the_first_batch_does_not_call_is_measured_too() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(32, 32) + shift, torch.randint(10, (32,))) for shift in (0, 0, 3, 3)]
    best = castwise.tune(Branching(), batches, loss=cross_entropy, formats=("bfloat16", "mxfp8"), tolerance=0.05)
    assert best.formats["wide"] == "mxfp8"
    assert "a forward of its 1 layer takes" in best.notes[-1]
