"""Tables in benchmarks/README.md are those that the scripts make of the committed results."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


TABLES = {
    "fidelity": "fidelity-cpu",
    "learning": "learning-cpu",
    "weight_programs": "weight_programs-cpu",
    "recipes": "recipes-cpu",
    "fault_finding": "fault_finding-cpu",
    "unscaled_faults": "unscaled_faults-cpu",
    "broken_scripts": "broken_scripts-cpu",
    "checked_changes": "checked_changes-cpu",
    "held_out_changes": "held_out_changes-cpu",
    "checked_settings": "checked_settings-cpu",
    "named_ops": "named_ops-cpu",
    "bisected": "bisected-cpu",
    "check_cost": "check_cost-cpu",
    "planted_precision": "planted_precision-cpu",
    "planted_spikes": "planted_spikes-cpu",
    "watching_cost": "watching_cost-cpu",
    "tune": "tune-cpu",
    "torch_tests": "torch_tests",
    "core_coverage": "coverage",
    "foreign.report": "foreign-cpu",
}


@pytest.mark.parametrize(("script", "name"), TABLES.items())
def test_the_page_shows_what_was_recorded(script: str, name: str) -> None:
    record = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    page = (BENCHMARKS / "README.md").read_text()
    shown = page.partition(f"<!-- {name} begins -->\n")[2].partition(f"\n<!-- {name} ends -->")[0]
    assert shown == importlib.import_module(f"benchmarks.{script}").table(record)


@pytest.mark.parametrize(("lines", "branches", "fails"), [(950, 95, ""), (949, 95, "lines"), (950, 94, "branches")])
def test_coverage_below_95_percent_fails(
    lines: int, branches: int, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = importlib.import_module("benchmarks.core_coverage")
    found = {"lines": [1000, lines], "branches": [100, branches]}
    monkeypatch.setattr(script, "measure", lambda: {"both": found})
    monkeypatch.setattr(script.recording, "write", lambda *_: None)
    with pytest.raises(SystemExit, match=f"coverage is below 95% of {fails}") if fails else contextlib.nullcontext():
        script.main()


def test_every_table_is_tied_to_a_record() -> None:
    page = (BENCHMARKS / "README.md").read_text()
    assert sorted(re.findall(r"<!-- (\S+) begins -->", page)) == sorted(TABLES.values())


def test_the_first_pages_show_what_was_recorded() -> None:
    readme = importlib.import_module("benchmarks.readme")
    for page in readme.PAGES:
        docs = "docs/" if page.name == "README.md" else ""
        assert readme.BEGINS + readme.figures(docs) + readme.ENDS in page.read_text()
    assert len(readme.PAGES[0].read_text().splitlines()) <= 120


def test_ratios_on_the_first_pages_are_distinguished_from_noise() -> None:
    readme = importlib.import_module("benchmarks.readme")
    costs = readme.result("step_cost")["results"]["124M, fused AdamW"]["castwise_to_torch"]
    inference = readme.result("weight_cache")["cases"]["MLP, inference, batch 1"]["torch / castwise"]
    assert costs["scaled + clipped step + update"]["verdict"] == "faster"
    assert min(inference["quartiles"]) > 1.5
    for page in readme.PAGES:
        assert "cannot tell" not in page.read_text()
