"""The page about peers says what benchmarks/results/peers-cpu.json does, and how each of its cells is known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "peers-cpu.json").read_text())
PAGE = (ROOT / "docs" / "explanation" / "peers.md").read_text()
BEFORE, REST = PAGE.split("<!-- peers-cpu begins -->")
MEASURED, AFTER = REST.split("<!-- peers-cpu ends -->")
RAN_OR_READ = re.compile(r" \((ran|read: [\w.*/, ]+)\)$")
PACKAGES = {"torch.amp": "torch", "torchao float8": "torchao"}


def tables(text: str) -> list[list[list[str]]]:
    """Return the cells of each table, its first row first."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.M)
    return [
        [
            row.strip("| \n").split(" | ")
            for i, row in enumerate(table.replace("| | ", "| - | ", 1).splitlines())
            if i != 1
        ]
        for table in found
    ]


FEATURES = tables(BEFORE)
SOURCES = {row[0]: row[2].split(", ") for row in tables(AFTER)[0][1:]}
CELLS = [
    (re.split(r" \d+\.|,", head)[0], row[0], cell)
    for first, *rows in FEATURES
    for row in rows
    for head, cell in zip(first[1:], row[1:], strict=True)
]
NANS, OVERFLOW, UNSCALING, RANKS, RULES, COST = tables(MEASURED)


def number(cell: str) -> float | None:
    """Read `2^16`, `0` or `-`."""
    base, _, exponent = cell.partition("^")
    return None if cell == "-" else float(base) ** int(exponent or 1)


def end(result: dict[str, Any]) -> str:
    loss = result["loss at the end / at first"]
    ending = "not finite" if loss is None else f"loss at {100 * loss:.2f}%"
    return "ends with an error" if result["error"] else ending


def says_what_was_heard(said: str, reported: str, result: dict[str, Any]) -> bool:
    shown = " ".join((result["error"] or next(iter(result["said"]), "-")).split())
    counts = {what: int(count) for count, what in re.findall(r"(\d+) x ([^,]+)", reported)}
    return shown.startswith(said.removesuffix(" ...")) and counts == result["reported"]


@pytest.mark.parametrize(("library", "feature", "cell"), CELLS, ids=[f"{cell[0]}: {cell[1]}" for cell in CELLS])
def test_each_cell_says_how_it_is_known(library: str, feature: str, cell: str) -> None:
    match = RAN_OR_READ.search(cell)
    assert match is not None
    if match[1] != "ran":
        assert set(match[1].removeprefix("read: ").split(", ")) <= set(SOURCES[library])


def test_there_are_ten_libraries_and_ten_features() -> None:
    assert [len(first) - 1 for first, *_ in FEATURES] == [5, 5]
    assert [row[0] for row in FEATURES[0][1:]] == [row[0] for row in FEATURES[1][1:]]
    assert len(CELLS) == 100
    assert RECORD["missing"] == []


def test_each_source_is_one_of_a_cell() -> None:
    read = {
        (library, file)
        for library, _, cell in CELLS
        if (match := RAN_OR_READ.search(cell)) and match[1] != "ran"
        for file in match[1].removeprefix("read: ").split(", ")
    }
    assert read == {(library, file) for library, files in SOURCES.items() for file in files}


def test_versions_are_those_that_were_run() -> None:
    for head in (head for first, *_ in FEATURES for head in first[1:]):
        name, _, version = head.removesuffix(", fp16").rpartition(" ")
        package = PACKAGES.get(name, name.lower())
        if package in RECORD["versions"]:
            assert version == RECORD["versions"][package].split("+")[0]
        else:
            assert not [cell for library, _, cell in CELLS if library == name and cell.endswith("(ran)")]
    listed = ", ".join(f"{name} {version}" for name, version in RECORD["versions"].items())
    assert f"\n{listed}\n" in MEASURED
    about = RECORD["machine"]
    assert all(str(about[key]) in MEASURED for key in ("device", "torch", "python", "date", "command"))


def test_rules_of_the_loss_scale_are_those_that_were_seen() -> None:
    cells = {library: cell for library, feature, cell in CELLS if feature == "loss scale"}
    pattern = (
        r"starts at (\S+), x(\S+) after (\d+) good steps, x(\S+) after (\d+) bad steps?, (.+?) after 200 bad steps"
    )
    keys = ("init", "growth", "interval", "back-off", "bad steps before it")
    rules = {row[0]: row[1:] for row in RULES[1:]}
    assert set(rules) == set(RECORD["rules"])
    for name, rule in RECORD["rules"].items():
        expected = [float(rule[key]) for key in keys]
        assert [number(cell) for cell in rules[name][:5]] == expected
        last = rule["after 200 bad steps"]
        assert rules[name][5] == last if isinstance(last, str) else number(rules[name][5]) == last
        if name in cells:
            *said, floor = re.match(pattern, cells[name]).groups()  # type: ignore[union-attr]
            assert [number(cell) for cell in said] == expected
            assert floor == last if isinstance(last, str) else number(floor) == last


def test_casts_and_graphs_are_those_that_were_counted() -> None:
    cells = {library: cell for library, feature, cell in CELLS if feature == "cached weight casts"}
    for library in ("castwise", "torch.amp", "Lightning", "Accelerate"):
        counted = RECORD["casts"]["castwise, WeightCache" if library == "castwise" else library]
        assert re.search(rf"\b{counted} casts? for 4 uses", cells[library])
    assert ", ".join(f"{name} {count}" for name, count in RECORD["casts"].items()) in MEASURED
    whole = {name: "yes" if value else "no" for name, value in RECORD["compiles as one graph"].items()}
    assert ", ".join(f"{name} {word}" for name, word in whole.items()) in MEASURED


def test_what_became_of_nan_losses_is_what_was_recorded() -> None:
    assert [row[0] for row in NANS[1:]] == list(RECORD["faults"])
    for name, before, after, fp32, fp16, said, reported in NANS[1:]:
        results = RECORD["faults"][name]
        shown = [results[key] for key in ("NaN losses", "NaN losses, fp16") if key in results]
        assert (number(before), number(after)) == (shown[0]["scale before"], shown[0]["scale after"])
        in_cells = [f"{result['steps taken after it']}, {end(result)}" for result in shown]
        assert [cell for cell in (fp32, fp16) if cell != "-"] == in_cells
        assert says_what_was_heard(said, reported, shown[0])
        assert all(result["steps taken at the fault"] == 0 for result in shown)


@pytest.mark.parametrize(
    ("fault", "rows"), [("overflow", OVERFLOW), ("unscaling", UNSCALING)], ids=["overflow", "unscaling"]
)
def test_what_became_of_an_overflow_is_what_was_recorded(fault: str, rows: list[list[str]]) -> None:
    assert [row[0] for row in rows[1:]] == [name for name, results in RECORD["faults"].items() if fault in results]
    for name, step, before, after, ending, said, reported in rows[1:]:
        result = RECORD["faults"][name][fault]
        is_taken = result["steps taken at the fault"] == 1 or not result["weights are finite"]
        assert step == ("taken" if is_taken else "skipped")
        assert (number(before), number(after)) == (result["scale before"], result["scale after"])
        assert ending == end(result)
        assert says_what_was_heard(said, reported, result)


def test_what_ranks_did_is_what_was_recorded() -> None:
    shown = {}
    for name, *of_ranks in RANKS[1:]:
        words = [cell.split(", new scale ") for cell in of_ranks]
        shown[name] = [[word == "steps", number(scale)] for word, scale in words]
    assert shown == RECORD["ranks"]


def test_costs_are_those_that_were_measured() -> None:
    assert [row[0] for row in COST[1:]] == list(RECORD["cost"])
    for name, plain, scaled, bf16 in COST[1:]:
        result = RECORD["cost"][name]
        assert plain == f"{result['plain ms']:.1f} ms"
        for cell, ratio in ((scaled, result["fp32, scaled / plain"]), (bf16, result["bf16 / plain"])):
            low, high = ratio["quartiles"]
            assert cell == f"{ratio['median']:.3f} ({low:.3f} - {high:.3f})"
