"""The page on formats names exactly what files and states hold."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.recorded import records_in

import castwise
from castwise._mistakes.mistake import Mistake
from castwise.amp._checkpoint import COUNTS, KEYS
from castwise.monitor._formats import LOW_PRECISION
from castwise.monitor._records import InvariantRecord, MistakeRecord, NormsRecord

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "formats.md").read_text()


def rows(heading: str) -> list[tuple[str, str]]:
    """The rows of the table under a heading."""
    _, _, section = PAGE.partition(f"# {heading}\n")
    table = re.search(r"^\|.*\n\|---\|---\|\n((?:\|.*\n)+)", section, re.M)
    assert table is not None
    return [tuple(cell.strip() for cell in row.strip("| ").split(" | ", 1)) for row in table[1].splitlines()]


def documented(heading: str) -> set[str]:
    return {name for keys, _ in rows(heading) for name in re.findall(r"`(.*?)`", keys)}


def named_in(heading: str, key: str) -> set[str]:
    """What the text beside a key names."""
    text = next(text for keys, text in rows(heading) if f"`{key}`" in keys)
    return set(re.findall(r"`(.*?)`", text))


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One record of each kind, of a real run in which the second step overflows."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = castwise.GradScaler("cpu", init_scale=16.0)
    given: list[dict[str, Any]] = []
    with (
        warnings.catch_warnings(),
        castwise.Monitor(model, optimizer, scaler, every=1, sinks=[folder, given.append], on_nonfinite="diagnose"),
    ):
        warnings.simplefilter("ignore")
        for factor in (1.0, 1e38):
            optimizer.zero_grad()
            scaler.scale((model(torch.randn(3, 4)) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    lines = records_in(folder)
    mistake = MistakeRecord.of(Mistake("scaler-for-bf16", "text", "corrected")).to_json()
    found: dict[str, dict[str, Any]] = {}
    lost, alone = {"kind": "lost", "records": 1}, {"kind": "alone", "step": 1, "why": "rank 1 left"}
    invariant = InvariantRecord(1, "never-updated", "text", "remedy").to_json()
    norms = NormsRecord(1, (-1, 0), {"weight": (0.5, 2.0)}).to_json()
    for record in (*lines, mistake, invariant, norms, lost, alone, *reversed(given)):  # of some the file holds less
        found[record["kind"]] = found.get(record["kind"], {}) | record
    return found


@pytest.mark.parametrize(
    "kind", ["run", "step", "sample", "diagnosis", "mistake", "invariant", "norms", "lost", "alone", "end"]
)
def test_a_record_has_exactly_the_keys_that_are_documented(kind: str, records: dict[str, dict[str, Any]]) -> None:
    assert documented(f"`{kind}`") == set(records[kind])


def test_what_is_inside_of_records_is_documented(records: dict[str, dict[str, Any]]) -> None:
    sample = records["sample"]
    numbers = sample["gradients"]["weight"]
    assert documented("Numbers") == set(numbers)
    assert documented("Update") == set(sample["weights"]["weight"])
    assert named_in("Numbers", "exponents") >= set(numbers["exponents"])
    assert named_in("Numbers", "formats") == set(LOW_PRECISION) | set(numbers["formats"]["fp16"])
    assert named_in("`run`", "settings") == set(records["run"]["settings"])
    assert {name.strip('"') for name in named_in("`step`", "cause")} == set(map(str, castwise.Cause))


def test_a_step_of_a_trace_has_the_places_that_are_documented(tmp_path: Path) -> None:
    given = {"largest": 0.5, "loss_is_finite": False, "exponents": {-1: 3}}
    castwise.schedules.write_trace(tmp_path / "trace.jsonl", [castwise.schedules.GradientRange(**given)])
    written = json.loads((tmp_path / "trace.jsonl").read_text())
    said = [re.findall(r"^`(\w+)`", text)[0] for _, text in rows("Traces")]
    assert json.loads(json.dumps([given[name] for name in said])) == written == [0.5, False, {"-1": 3}]


def test_a_policy_file_has_exactly_the_fields_that_are_documented(tmp_path: Path) -> None:
    policy = castwise.Policy("float16", {"a": "float32"}, {"softmax": "float32"}, "float32", "cast")
    policy.to_file(tmp_path / "policy.json")
    assert documented("Policy files") == set(json.loads((tmp_path / "policy.json").read_text()))


SCHEDULES = {
    "Dynamic": castwise.schedules.Dynamic(hysteresis=2),
    "Headroom": castwise.schedules.Headroom(),
    "Static": castwise.schedules.Static(),
    "Guard": castwise.schedules.Guard(),
}


def test_every_schedule_has_a_row() -> None:
    offered = {name: getattr(castwise.schedules, name) for name in castwise.schedules.__all__}
    kinds = {
        name
        for name, kind in offered.items()
        if isinstance(kind, type) and issubclass(kind, castwise.schedules.Schedule) and not inspect.isabstract(kind)
    }
    assert set(SCHEDULES) == kinds - {"Schedule"} == {name.strip("`") for name, _ in rows("Trackers")}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_state_has_exactly_the_keys_that_are_documented(name: str) -> None:
    state = castwise.GradScaler("cpu", schedule=SCHEDULES[name]).state_dict()
    assert documented("Scaler") == set(state)
    assert named_in("Scaler", "schedule") == set(state["schedule"])
    assert set(re.findall(r"`(.*?)`", dict(rows("Trackers"))[f"`{name}`"])) == set(state["schedule"]["trackers"])


def test_a_state_of_torchs_own_schedule_has_no_more_than_counters_beside_torchs_keys() -> None:
    assert set(castwise.GradScaler("cpu").state_dict()) == {*KEYS, *COUNTS}
    assert set(torch.amp.GradScaler("cpu").state_dict()) == set(KEYS)
    assert castwise.GradScaler("cpu", enabled=False).state_dict() == {}
