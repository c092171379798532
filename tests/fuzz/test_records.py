"""Records of runs and traces: read whole, or refused with file and line; never half a page, and never a crash."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.damage import JSON, a_share, attempt, changed, mangled
from tests.monitor import recorded
from typer.testing import CliRunner

import castwise
from castwise._cli import app
from castwise.monitor import Run
from castwise.report import write_report
from castwise.schedules import Dynamic, GradientRange, read_trace, simulate, write_trace

TEXTS = ("cause", "phase", "module", "op", "text", "advice")


@pytest.fixture(scope="module", autouse=True)
def _pages_are_small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("castwise.report._html_report.load_plotly", lambda: "")
        yield


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A run with records of every kind."""
    records = [
        *(recorded.step(n, 2.0**14, "overflow" if n == 3 else None, parameters=["a.weight"]) for n in range(1, 6)),
        *(recorded.sample(n, 2.0**14, {"a": -16.0, "": -20.0}, {"a": 3.0}) for n in (2, 4)),
        {"kind": "diagnosis", "step": 3, **dict.fromkeys(TEXTS, "text")},
        {"kind": "mistake", "line": 1, **dict.fromkeys(("name", "text", "corrected", "file", "source"), "text")},
        recorded.step(6, None, loss="nan", grad_norm=None),
        {"kind": "end", "step": 6},
    ]
    return (recorded.write(tmp_path_factory.mktemp("valid"), *records) / "monitor.jsonl.gz").read_bytes()


def use(path: Path, page: Path | None) -> None:
    """Do all that is done with a file of records."""
    run, refusal = attempt(lambda: Run.read(path), ValueError)
    if refusal is not None:
        assert refusal.startswith(str(path))
        assert "\n" not in refusal
        return
    assert str(castwise.verdict(run)) == str(castwise.verdict(run))
    for each in run.gradient_ranges():
        assert math.isfinite(each.largest)
    if page is not None:
        write_report([run], page)
        assert page.read_bytes().endswith(b"</html>")
        page.unlink()
    assert not list(path.parent.glob(".*.tmp"))


@given(data=st.data())
@a_share(8)
def test_damaged_files_are_runs_or_refused(
    data: st.DataObject, valid: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "monitor.jsonl.gz"
    path.write_bytes(data.draw(mangled(valid)))
    use(path, None)
    path = tmp_path_factory.getbasetemp() / "plain.jsonl"
    path.write_bytes(data.draw(mangled(gzip.decompress(valid))))
    use(path, None)


def records_in(valid: bytes) -> list[Any]:
    return [json.loads(line) for line in gzip.decompress(valid).splitlines()]


@given(data=st.data())
@a_share(8)
def test_other_values_are_runs_or_refused(
    data: st.DataObject, valid: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "other.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in data.draw(changed(records_in(valid)))))
    use(path, None)


# What the check of records lets through has to be as good for the page, in whose numbers there is no NaN.
EXTREMES = st.sampled_from(
    [0, 1, 2**62, 0.0, 1e-300, 1.7e308, -1.7e308, "nan", "inf", "-inf", -1074, 1023, "", "\ud800", None]
)


@given(data=st.data())
@a_share(20)
def test_extreme_values_have_a_page(
    data: st.DataObject, valid: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "extreme.jsonl"
    records = data.draw(changed(records_in(valid), EXTREMES))
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    use(path, folder / "extreme.html")
    done = CliRunner().invoke(app, ["report", "--text", str(path)])
    assert done.exit_code in (0, 2), done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)


def lines(*steps: GradientRange, folder: Path) -> bytes:
    write_trace(folder / "valid.trace", steps)
    return (folder / "valid.trace").read_bytes()


@given(data=st.data())
@a_share(8)
def test_damaged_traces_are_traces_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "damaged.trace"
    valid = lines(GradientRange(3.0), GradientRange(2.0, {-3: 4, 5: 1}), GradientRange(0.0, {}, False), folder=folder)
    exponents = st.dictionaries(st.integers(-1100, 1100) | st.integers(), st.integers(0, 9), max_size=3)
    valid += f"{json.dumps([1.0, True, data.draw(exponents)])}\n".encode()
    values = data.draw(changed([json.loads(line) for line in valid.splitlines()]) | st.lists(JSON, max_size=3))
    damaged = "".join(f"{json.dumps(each)}\n" for each in (values if isinstance(values, list) else [values])).encode()
    path.write_bytes(data.draw(st.just(damaged) | mangled(valid)))
    trace, refusal = attempt(lambda: read_trace(path), ValueError)
    if refusal is not None:
        assert str(path) in refusal
        return
    assert len(simulate(trace, Dynamic()).scales) == len(trace)
