"""What pages and the package say of versions that were tested is what `benchmarks/torch_versions.py` has recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.torch_versions import ALL_TESTS, LIGHT_TESTS, SMALL_SET, Suite

from benchmarks import torch_versions

ROOT = Path(__file__).parents[2]
SUITES = pytest.mark.parametrize("suite", [SMALL_SET, ALL_TESTS, LIGHT_TESTS], ids=lambda suite: suite.name)


def record_of(suite: Suite) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(suite.result.read_text()) if suite.result.exists() else {}
    return record


@SUITES
def test_the_page_shows_what_was_recorded(suite: Suite) -> None:
    assert torch_versions.shown(suite, record_of(suite)) in torch_versions.PAGE.read_text()


@SUITES
def test_every_recorded_version_is_the_one_it_stands_for(suite: Suite) -> None:
    assert all(found[suite.of].startswith(f"{version}.") for version, found in record_of(suite).items())


def test_the_small_set_was_run_with_all_versions() -> None:
    assert set(record_of(SMALL_SET)) == set(torch_versions.VERSIONS)


@pytest.mark.parametrize("suite", [SMALL_SET, ALL_TESTS], ids=lambda suite: suite.name)
def test_every_recorded_torch_has_passed(suite: Suite) -> None:
    assert all(found["status"] == 0 for found in record_of(suite).values())


def test_classifiers_and_nox_list_the_same_pythons_and_all_that_were_run() -> None:
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    listed = re.search(r"^PYTHONS = (\[.*\])$", (ROOT / "noxfile.py").read_text(), re.M)
    assert listed is not None
    assert json.loads(listed[1]) == pythons
    assert set(record_of(LIGHT_TESTS)) <= set(pythons)
