"""Scripts of one process under `castwise.install`: of each that breaks an invariant, that one is named; of the correct
ones nothing is reported but notes."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import castwise
from castwise.monitor import InvariantRecord
from castwise.monitor._run_files import read_runs

BROKEN = sorted((Path(__file__).parent / "scripts").glob("*.py"), key=lambda path: path.name)
CORRECT = sorted((Path(__file__).parent / "correct").glob("*.py"), key=lambda path: path.name)


def broken_in(script: Path, out: Path, **options: Any) -> list[InvariantRecord]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        castwise.install(out, **options)
        try:
            runpy.run_path(str(script))
        finally:
            castwise.uninstall()
    return [record for run in read_runs([out]) for record in run.invariants]


@pytest.fixture(autouse=True)
def _without_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the page, which takes longer than the scripts."""
    monkeypatch.setattr("castwise.report._summary.write_report", lambda runs, page, **_: page)


@pytest.mark.parametrize("script", BROKEN, ids=lambda path: path.stem)
def test_the_invariant_that_a_script_breaks_is_named_and_no_other(script: Path, tmp_path: Path) -> None:
    expected, _, last = script.read_text().splitlines()[0].removeprefix("# broken: ").partition(" by step ")
    found = broken_in(script, tmp_path)
    assert {record.name for record in found if record.severity == "warning"} == {expected}
    assert all(record.step <= int(last or 21) for record in found)  # at the second check


@pytest.mark.parametrize("script", CORRECT, ids=lambda path: path.stem)
def test_correct_scripts_break_none(script: Path, tmp_path: Path) -> None:
    assert [record for record in broken_in(script, tmp_path) if record.severity != "note"] == []
