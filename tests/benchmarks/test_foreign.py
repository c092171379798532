"""`make foreign`: its rows that need no environment of their own, and that a difference makes it fail."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "foreign"
LIGHT = (
    *("GPT-2", "BERT", "T5", "Llama", "mixture of experts (Mixtral)"),
    *("nn.LSTM", "nn.TransformerEncoder", "nn.MultiheadAttention"),
)
Facts = dict[str, str]


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what imports a module of the suite."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    return importlib.import_module


@pytest.fixture
def compare(foreign: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module that compares, without rows: their libraries are not installed here."""
    rows = SimpleNamespace(ROWS=[], Row=SimpleNamespace, Side=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "rows", rows)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "compare", raising=False)
    module: ModuleType = foreign("compare")
    return module


def noted(foreign: Any, name: str, way: str) -> Facts:
    facts: Facts = foreign("facts").FACTS
    facts.clear()
    foreign("models").run(name, way)
    return dict(facts)


@pytest.mark.filterwarnings("ignore:this CPU has no units for torch:UserWarning")
@pytest.mark.filterwarnings("ignore::castwise.MixedPrecisionMistake")
@pytest.mark.parametrize("name", LIGHT)
def test_a_model_has_torchs_bits_in_every_way_to_use_castwise(name: str, foreign: Any) -> None:
    expected = noted(foreign, name, "torch")
    assert len(expected) > 30
    for way in ("autocast", "monitor", "weight_cache", "policy"):
        assert noted(foreign, name, way) == expected, way


def test_versions_are_those_of_packages_without_their_extras(compare: Any) -> None:
    names = compare.required()
    assert {"torch", "ray"} <= set(names)
    assert all(name.replace("-", "").replace("_", "").isalnum() for name in names)


def record_of(compare: Any, monkeypatch: pytest.MonkeyPatch, kind: str, *runs: Facts) -> dict[str, Any]:
    """Return the record of a row whose sides note this: torch, castwise, and torch once more."""
    waiting = list(runs)
    monkeypatch.setattr(compare, "run", lambda row, side: waiting.pop(0))
    row = SimpleNamespace(kind=kind, name="a row", source="here", sides={"torch": None, "castwise": None})
    record: dict[str, Any] = compare.compared(row)
    assert not waiting
    return record


GOOD = {"loss 1": "float32 () mean 1 bits 00", "exit code": "0"}


def test_what_is_the_same_is_run_once(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of(compare, monkeypatch, "script", GOOD, GOOD)
    assert not compare.is_wrong(record)
    assert compare.verdict(record) == "castwise: same"


@pytest.mark.parametrize(
    "castwise",
    [{**GOOD, "loss 1": "float32 () mean 1 bits 01"}, {"exit code": "0"}, {**GOOD, "loss 2": "new"}],
    ids=["other bits", "missing", "more"],
)
def test_a_difference_fails_and_is_named(castwise: Facts, compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of(compare, monkeypatch, "script", GOOD, castwise, GOOD)
    assert compare.is_wrong(record)
    assert compare.verdict(record) == "castwise: **1 differ**"
    assert record["sides"]["castwise"]["of which"][0].startswith("loss ")


def test_what_torch_does_not_repeat_is_set_aside_and_named(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = ({**GOOD, "line 1 of the output": f"{seconds} s"} for seconds in (3, 4, 5))
    record = record_of(compare, monkeypatch, "script", first, second, third)
    assert not compare.is_wrong(record)
    assert compare.verdict(record) == "castwise: same; torch does not repeat 1"
    assert record["not repeated by torch"]["of which"] == ["line 1 of the output"]


def test_a_row_that_torch_cannot_run_fails(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {"exit code": "1", "last line of errors": "ImportError: no such module"}
    record = record_of(compare, monkeypatch, "script", ended, ended)
    assert compare.is_wrong(record)
    assert "no such module" in compare.verdict(record)
    record = record_of(compare, monkeypatch, "suite", {"a::b": "skipped: no GPU"}, {"a::b": "skipped: no GPU"})
    assert compare.is_wrong(record)


def test_an_exception_covers_what_it_names_and_no_more(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    warning = "warning: UserWarning: this CPU has no units for torch.bfloat16: its ops are emulated"
    for rank in ("", "rank 1: "):
        record = record_of(compare, monkeypatch, "script", GOOD, {**GOOD, rank + warning: "given"}, GOOD)
        assert not compare.is_wrong(record)
        assert compare.verdict(record) == "castwise: same (emulated dtype)"
    record = record_of(compare, monkeypatch, "script", {**GOOD, warning: "given"}, GOOD, {**GOOD, warning: "given"})
    assert compare.is_wrong(record)


def test_rows_that_are_run_again_replace_theirs_alone_and_in_the_same_setting_only(
    compare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "foreign" / "requirements.txt").write_text("torch\n")
    (tmp_path / "README.md").write_text("<!-- foreign-cpu begins -->\n<!-- foreign-cpu ends -->\n")
    result = tmp_path / "results" / "foreign-cpu.json"
    monkeypatch.setattr(compare, "HERE", tmp_path / "foreign")
    monkeypatch.setattr(compare.recording, "HERE", tmp_path)
    first, wrong = (
        record_of(compare, monkeypatch, "script", GOOD, GOOD),
        record_of(compare, monkeypatch, "script", GOOD, {}, GOOD),
    )
    first["name"], wrong["name"] = "first", "second"
    compare.write([first, wrong])
    compare.write([{**first, "name": "second"}], again=True)
    rows = json.loads(result.read_text())["rows"]
    assert [(row["name"], compare.is_wrong(row)) for row in rows] == [("first", False), ("second", False)]
    before = result.read_bytes()
    (tmp_path / "foreign" / "requirements.txt").write_text("torch\npytest\n")
    with pytest.raises(SystemExit, match="the result file has another versions: run all rows"):
        compare.write([wrong], again=True)
    assert result.read_bytes() == before


def test_a_script_that_tells_castwise_from_torch_is_different(compare: Any, tmp_path: Path, warm_python: None) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\nprint('made')\nprint(torch.amp.GradScaler.__module__)\n")
    row = SimpleNamespace(kind="script", program=(str(script),), sdist=None, seconds=120, ranks=1)
    torch, castwise = (compare.run(row, SimpleNamespace(under=under, arguments=())) for under in ("torch", "run"))
    assert torch["exit code"] == castwise["exit code"] == "0"
    assert list(map(str, compare.differences(torch, castwise))) == [
        "line 2 of the output: torch torch.amp.grad_scaler; castwise castwise.amp.grad_scaler"
    ]
