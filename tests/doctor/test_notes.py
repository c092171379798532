"""What is known of versions of torch is true of the one that is here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from benchmarks.torch_versions import VERSIONS

from castwise._doctor.notes import notes_on
from castwise._torch_private import backwards_without_autocast

ROOT = Path(__file__).parents[2]


def about(version: str) -> list[str]:
    return [" ".join(note.text.split(" ")[:2]) for note in notes_on(version)]


@pytest.mark.parametrize(
    ("version", "notes"),
    [
        ("2.11.0", ["Code compiled", "This version"]),
        ("2.12.1+cu126", ["castwise is", "Code compiled", "This version"]),
        ("2.13.0", ["torch.autocast no", "This version"]),
        ("2.13.0+cpu", ["torch.autocast no", "This version"]),
        ("2.14.0.dev20261201", ["castwise is", "torch.autocast no", "This version"]),
        ("2.14.1+cu130", ["castwise is", "torch.autocast no", "This version"]),
        ("2.15.0+cu132", ["torch.autocast no", "This version"]),
        ("2.16.0a0+git1234567", ["torch.autocast no", "This torch"]),
        ("2.16.0", ["torch.autocast no", "This torch"]),
        ("3.0", ["torch.autocast no", "This torch"]),
    ],
)
def test_a_version_gets_its_own_notes(version: str, notes: list[str]) -> None:
    assert about(version) == notes


def test_versions_that_are_tested_in_full_are_those_of_ci_and_of_recorded_runs_of_all_tests() -> None:
    whole = json.loads((ROOT / "benchmarks" / "results" / "all_tests.json").read_text())
    passed = {version for version, run in whole.items() if run["status"] == 0}
    in_full = {version for version in VERSIONS if "castwise is" not in about(version)}
    assert in_full == passed | {"2.13"}
    assert re.findall(r"2\.\d+", notes_on("2.12")[0].text) == [*sorted(in_full), *sorted({*VERSIONS} - in_full)]


def test_sources_are_files_of_this_repository() -> None:
    for version in ("2.11", "2.12", "2.13", "2.16"):
        for note in notes_on(version):
            file = note.source.split(";")[0].split(" and ")[0]
            assert (ROOT / file).is_file() or (ROOT / "src" / file).is_file()


@pytest.mark.skipif("torch.autocast no" not in about(torch.__version__), reason="not said of this version")
def test_a_forward_under_no_grad_takes_no_gradients_from_later_ones() -> None:
    linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            linear(x)
        loss = linear(x).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert linear.weight.grad is not None


def test_before_2_13_a_setting_is_of_all_threads() -> None:
    assert (backwards_without_autocast() is None) is ("Code compiled" in about(torch.__version__))
