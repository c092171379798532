"""Exemptions, reports, and what checks of invariants must not change."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise._invariants.invariant import INVARIANTS, Exemptions, how_to_exempt
from castwise._state_decay import falling_share
from castwise.report import write_report
from castwise.report._summary import Summary


class Training:
    """A model with a part that is never used, trained under a monitor."""

    def __init__(self, invariants: Any = True, steps: int = 21) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"used": nn.Linear(8, 8), "spare": nn.Linear(8, 8)})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.records: list[dict[str, Any]] = []
        with (
            warnings.catch_warnings(record=True) as self.warned,
            castwise.Monitor(self.model, self.optimizer, sinks=[self.records.append], invariants=invariants),
        ):
            warnings.simplefilter("always")
            for _ in range(steps):
                self.model["used"](torch.randn(4, 8)).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

    @property
    def broken(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "invariant"]


def test_a_broken_invariant_is_recorded_and_warned_of_once() -> None:
    training = Training(steps=110)
    (broken,) = training.broken
    assert (broken["name"], broken["step"], broken["severity"]) == ("never-updated", 20, "warning")
    assert broken["parameters"] == ["spare.weight", "spare.bias"]
    (warning,) = [each for each in training.warned if each.category is RuntimeWarning]
    assert str(warning.message) == (
        "never-updated: spare.weight, spare.bias: no gradient in 20 steps of SGD. Look for detach(), no_grad() or a "
        "module that is not called; freeze what is meant to stay as it is. If it is intended: "
        "castwise run --exempt never-updated."
    )


class Still(torch.optim.Optimizer):
    """Steps by nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as torch's do without a closure
        pass


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_the_trust_ratio_is_suspected_of_parameters_that_stay_at_0(value: float) -> None:
    model = nn.Linear(4, 1)
    nn.init.constant_(model.weight, value)
    nn.init.zeros_(model.bias)
    optimizer = Still(model.parameters(), {})
    records: list[dict[str, Any]] = []
    with warnings.catch_warnings(), castwise.Monitor(model, optimizer, sinks=[records.append], invariants=True):
        warnings.simplefilter("ignore")
        for _ in range(21):
            (model(torch.randn(4, 4)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (broken,) = [record for record in records if record["kind"] == "invariant"]
    assert ("trust ratio" in broken["remedy"]) is (value == 0.0)


def test_a_number_that_is_clamped_at_its_bound_is_a_note() -> None:
    model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(1.0)), "weight": nn.Parameter(torch.ones(4))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records: list[dict[str, Any]] = []
    with castwise.Monitor(model, optimizer, sinks=[records.append], invariants={"written-weights": ["*"]}):
        for _ in range(21):
            (model["weight"] * model["scale"] - 9).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model["scale"].clamp_(0, 1)
    (broken,) = [record for record in records if record["kind"] == "invariant"]
    assert (broken["name"], broken["parameters"], broken["severity"]) == ("never-updated", ["scale"], "note")


def test_a_monitor_checks_nothing_unless_it_is_asked_to() -> None:
    assert Training(invariants=False).broken == []


@pytest.mark.parametrize("patterns", [["spare.*"], ["*"]])
def test_exempt_parameters_are_left_out(patterns: list[str]) -> None:
    training = Training({"never-updated": patterns})
    assert training.broken == []
    assert training.warned == []


def test_what_may_be_intended_names_the_option_that_exempts_it() -> None:
    texts = {name: how_to_exempt(name) for name in INVARIANTS}
    assert [name for name, text in texts.items() if not text] == ["written-weights", "loss-spike"]
    assert all(text.endswith(f": castwise run --exempt {name}.") for name, text in texts.items() if text)
    assert all(Exemptions(Exemptions.parsed([text[:-1].split()[-1]])) for text in texts.values() if text)
    assert texts["gradients-not-reduced"].startswith(" If it is intended (local SGD): ")


def test_the_others_of_an_exempt_parameter_are_named() -> None:
    (broken,) = Training({"never-updated": ["*.bias"]}).broken
    assert broken["parameters"] == ["spare.weight"]
    assert broken["text"].startswith("spare.weight: no gradient")


def test_wrong_exemptions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^invariants: there is no 'never-updatd'; did you mean 'never-updated'\?$"):
        Exemptions({"never-updatd": []})
    with pytest.raises(TypeError, match=r"must be a list of patterns of names, got 'experts.\*'$"):
        Exemptions({"never-updated": "experts.*"})
    with pytest.raises(TypeError, match="must be True, False or a mapping"):
        Exemptions("never-updated")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ValueError, match=r"must begin with one of 'not-in-optimizer', .* got 'x'"):
        Exemptions.parsed(["x=y"])
    assert Exemptions.parsed(["never-updated=a.*", "never-updated=b", "train-eval-mode"]) == {
        "never-updated": ["a.*", "b"],
        "train-eval-mode": ["*"],
    }
    with pytest.raises(ValueError, match="did you mean"):
        castwise.install("x", invariants={"never-updatd": []})
    assert not castwise._installation.is_recording()


def test_the_page_the_summary_and_its_json_have_the_finding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "spare": nn.Linear(8, 8)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(), castwise.Monitor(model, optimizer, sinks=[tmp_path], invariants=True):
        warnings.simplefilter("ignore")
        for _ in range(21):
            model["used"](torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    run = castwise.monitor.Run.read(tmp_path)
    summary = Summary.of([run])
    text = "spare.weight, spare.bias: no gradient in 20 steps of SGD."
    assert [line for line in summary.lines() if line.startswith(f"warning: {text}")]
    (finding,) = [found for found in summary.record()["runs"][0]["findings"] if "invariant" in found["evidence"]]
    assert finding["evidence"] == {
        "invariant": "never-updated",
        "first_step": 20,
        "broken_for": ["spare.weight", "spare.bias"],
    }
    assert summary.fails(["warning"])
    assert text in write_report([run], tmp_path / "report.html").read_text()


def test_checks_change_no_bit_and_no_random_number() -> None:
    def trained(invariants: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with castwise.Monitor(model, optimizer, invariants=invariants):
            for _ in range(52):
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [*model.state_dict().values(), torch.rand(4)]

    assert all(map(torch.equal, trained(True), trained(False)))


def test_a_layer_that_looks_at_its_hooks_computes_what_it_does_without() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        alone = model(x)
    of_region = torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16)
    with castwise.Monitor(model, optimizer, invariants=True), of_region[0], of_region[1]:
        watched = model(x)
    assert alone.dtype == watched.dtype
    assert torch.equal(alone, watched)


def test_a_check_that_fails_is_turned_off_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("castwise._invariants.train_mode.TrainMode.stepping", fail)
    training = Training()
    assert [record["name"] for record in training.broken] == ["never-updated"]
    texts = [str(warning.message) for warning in training.warned]
    assert texts[0] == "castwise does not check modes any more, because the check failed: RuntimeError: no"
    assert len(texts) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", [0.9, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999])
def test_averages_fall_where_the_rule_says(dtype: torch.dtype, beta: float) -> None:
    eps = torch.finfo(dtype).eps
    binade = (1.0 + eps * torch.arange(round(1 / eps))).to(dtype)
    falls = (binade.double() * beta).to(dtype) < binade
    assert abs(falls.double().mean().item() - falling_share(dtype, beta)) <= eps


def test_master_weights_refuse_an_average_that_cannot_fall() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r'an average with beta 0[.]999 that is rounded to "nearest"'):
        castwise.MasterWeights(optimizer, model, state_dtype={"exp_avg_sq": (torch.bfloat16, "nearest")})
    assert model.weight.dtype is torch.float32
    castwise.MasterWeights(optimizer, model, state_dtype={"exp_avg_sq": torch.bfloat16})  # rounded stochastically


def test_the_manual_lists_all_invariants() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "invariants.md").read_text()
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")] == list(INVARIANTS)
