"""Scripts under a watch: of each that makes a mistake, in the line that ends in its name, that line is named and no
other; of the correct ones nothing is said."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import castwise
from castwise._mistakes.mistake import Mistake, Place
from castwise._mistakes.script_line import ScriptLine
from castwise._mistakes.watch import WATCH, MixedPrecisionMistake

MISTAKES = sorted((Path(__file__).parent / "scripts").glob("*.py"), key=lambda path: path.name)
CORRECT = sorted((Path(__file__).parent / "correct").glob("*.py"), key=lambda path: path.name)


def needs(script: Path) -> list[pytest.MarkDecorator]:
    is_without_cuda = script.stem == "scaler_without_cuda"
    return [pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")] if is_without_cuda else []


def wrong_lines(script: Path) -> list[tuple[str, int]]:
    lines = enumerate(script.read_text().splitlines(), 1)
    return [(found[1], number) for number, line in lines if (found := re.search(r"  # ([a-z0-9-]+)$", line))]


def run(script: Path) -> tuple[list[Mistake], list[warnings.WarningMessage]]:
    return watched(script)[:2]


def watched(script: Path) -> tuple[list[Mistake], list[warnings.WarningMessage], dict[str, Any]]:
    """The mistakes that a script makes, what it is warned of, and its names."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with castwise.installed():
            made = runpy.run_path(str(script))
        mistakes = list(WATCH.found)
    return mistakes, [each for each in warned if issubclass(each.category, MixedPrecisionMistake)], made


def unwatched(script: Path) -> dict[str, Any]:
    """The names of a script with castwise's classes, but no watch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with castwise.installed():
            WATCH.stop()
            return runpy.run_path(str(script))


@pytest.mark.parametrize(
    "script", [pytest.param(each, marks=needs(each)) for each in [*MISTAKES, *CORRECT]], ids=lambda path: path.stem
)
def test_the_line_of_a_mistake_is_named_and_nothing_else(script: Path) -> None:
    mistakes, warned, made = watched(script)
    wrong = wrong_lines(script)
    assert len(wrong) == (1 if script in MISTAKES else 0)
    assert [(each.name, each.place.line if each.place else 0) for each in mistakes] == wrong
    assert [(each.filename, each.lineno) for each in warned] == [(str(script), line) for _, line in wrong]
    for mistake in mistakes:
        assert mistake.place is not None
        assert mistake.place.source == script.read_text().splitlines()[mistake.place.line - 1].strip()
        assert mistake.corrected
        assert mistake.corrected in str(mistake).replace("\n             ", "\n")
    if script in MISTAKES:  # looking changes no bit
        models = made["model"], unwatched(script)["model"]
        assert all(map(torch.equal, *(list(model.parameters()) for model in models)))


def test_there_are_scripts_enough() -> None:
    assert len(MISTAKES) >= 15
    assert len(CORRECT) >= 12


def test_every_kind_has_a_script() -> None:
    said = set()
    for file in (Path(castwise.__file__).parent / "_mistakes").glob("*.py"):
        said.update(re.findall(r'self\.watch\.report\(\s*"([a-z0-9-]+)"', file.read_text()))
    assert said == {name for script in MISTAKES for name, _ in wrong_lines(script)}
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "run.md").read_text()
    assert said == set(re.findall(r"^\| `([a-z][a-z0-9-]+)` \| ", page, re.M))


@pytest.mark.parametrize(
    ("script", "scaler", "optimizer"),
    [
        (
            "class T:\n    def go(self, x):\n        self.amp.scale(x).backward()\n        self.amp.step(self.opt)\n"
            "        clip_(x)\n",
            "self.amp",
            "self.opt",
        ),
        ("def go(opt):\n    x = 1\n    opt.step()\n", "", "opt"),
        ("def go(a, b):\n    x = 1\n    a.step(), b.step()\n", "", ""),
        ("not Python at all\n", "", ""),
    ],
)
def test_names_are_those_of_the_script(script: str, scaler: str, optimizer: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    line = ScriptLine(Place(str(path), len(script.splitlines())))
    assert (line.scaler, line.optimizer) == (scaler, optimizer)
    for unknown in (ScriptLine(None), ScriptLine(Place("<nowhere>", 1))):
        assert (unknown.scaler, unknown.optimizer) == ("", "")
