"""Figures are what the result files say, and what is no figure is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import results

CONTENT = {"rows": [{"torch / castwise": 5.356, "share": 0.0451, "none": None}], "a~b": 7, "": "odd"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x.json").write_text(json.dumps(CONTENT))
    return tmp_path


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("x.json#/rows/0/torch ~1 castwise|.1f", "5.4"),
        ("x.json#/rows/0/share|.1%", "4.5%"),
        ("x.json#/a~0b", "7"),
        ("x.json#/", "odd"),
    ],
)
def test_a_figure_is_found_and_formatted(reference: str, text: str, folder: Path) -> None:
    assert results.figure(reference, folder) == text


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("y.json#/rows", "no file 'y.json' in"),
        ("x.json#/rows/1/share", "nothing at '1'"),
        ("x.json#/rows/0/speed", "nothing at 'speed' .* keys are torch / castwise, share, none"),
        ("x.json#rows", "begins with /"),
        ("x.json#/rows/0", "must be a number or text, got dict"),
        ("x.json#/rows/0/none", "must be a number or text, got NoneType"),
        ("x.json#/rows/0/share|q", "cannot be formatted with 'q'"),
        ("x.json#/a~0b/deeper", "nothing at 'deeper'"),
    ],
)
def test_what_is_not_there_is_an_error(reference: str, why: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=why):
        results.figure(reference, folder)


def test_machines_that_are_the_same_are_named_once(tmp_path: Path) -> None:
    about = {"device": "CPU", "cores": 2, "threads": 1, "torch": "2", "python": "3", "date": "2026-01-01"}
    for name, command in (("a", "one"), ("b", "two"), ("c", "two")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": {**about, "command": command}}))
    (tmp_path / "d.json").write_text(json.dumps({"machine": {**about, "cores": 4, "command": "one"}}))
    assert results.machines("a.json, b.json, c.json, d.json", tmp_path) == {
        "CPU, 2 cores, 1 thread, torch 2, Python 3, 2026-01-01": ["one", "two"],
        "CPU, 4 cores, 1 thread, torch 2, Python 3, 2026-01-01": ["one"],
    }
