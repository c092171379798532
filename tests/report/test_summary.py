"""Runs in six lines."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.monitor import recorded

from castwise._cli.report_text import print_runs
from castwise._terminal import new_console
from castwise.monitor import Run
from castwise.report._html_report import write_report
from castwise.report._summary import Level, Summary, _seen_from_here, end


def mistake(line: int) -> dict[str, Any]:
    return {
        "kind": "mistake",
        "name": f"mistake-{line}",
        "text": "the scale is not updated",
        "corrected": "scaler.update()",
        "file": "train.py",
        "line": line,
        "source": "",
    }


def diverging(folder: Path, mistakes: int = 0) -> Path:
    steps = [recorded.step(n, 2.0, loss=1.5 * 30.0**n, grad_norm=2.0 * 30.0**n) for n in range(1, 6)]
    skips = [recorded.step(n, 2.0, "overflow", loss=1e12) for n in range(6, 9)]
    return recorded.write(folder, *steps, *skips, *map(mistake, range(1, mistakes + 1)))


def test_six_lines_say_what_was_skipped_why_and_where_the_report_is(tmp_path: Path) -> None:
    summary = end([diverging(tmp_path, mistakes=4)], tmp_path / "report.html")
    assert summary is not None
    steps, *mistakes, finding, report = summary.lines()
    assert steps == "8 steps; skipped: 3 overflow"
    assert finding.startswith("critical: ")
    assert "diverge" in finding
    assert mistakes == [
        "mistake: train.py:1: the scale is not updated",
        "mistake: train.py:2: the scale is not updated",
        "more mistakes: 2",
    ]
    assert report == f"report: {tmp_path / 'report.html'}"
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("is_diagnosed", [True, False])
def test_of_the_same_severity_what_names_its_line_leads(tmp_path: Path, is_diagnosed: bool) -> None:
    broken = {"kind": "invariant", "step": 1, "name": "never-updated", "text": "w stays.", "remedy": "Look at it."}
    found = {"kind": "diagnosis", "step": 2, "cause": "non-finite loss", "phase": "forward", "module": "", "op": "div"}
    found |= {"text": "div gives nan\n  at net.py:31: x / y", "summary": "It divides by 0.", "advice": "clamp it"}
    steps = [recorded.step(1, 2.0), recorded.step(2, 2.0, "non-finite loss"), recorded.step(3, 1.0)]
    records = [*steps, broken, *([found] if is_diagnosed else []), mistake(7)]
    summary = Summary.of([Run.read(recorded.write(tmp_path, *records))])
    lines = [re.match(r"mistake|warning: w stays|warning: The loss was inf", line) for line in summary.lines()[1:]]
    kinds = [line and line[0] for line in lines]
    if is_diagnosed:
        assert kinds == ["warning: The loss was inf", "mistake", "warning: w stays"]
        assert "It divides by 0" in summary.lines()[1]
    else:
        assert kinds == ["mistake", "warning: w stays"]


def noted(step: int, name: str, text: str) -> dict[str, Any]:
    remedy = "Look at it."
    return {"kind": "invariant", "step": step, "name": name, "text": text, "remedy": remedy, "severity": "note"}


@pytest.mark.parametrize(
    ("count", "line"),
    [
        (0, None),
        (1, "note: the learning rate rose at step 2. Look at it."),
        (2, "2 notes in the report, the first: the learning rate rose at step 2. Look at it."),
    ],
)
def test_notes_of_invariants_have_one_line(count: int, line: str | None, tmp_path: Path) -> None:
    notes = [
        noted(2, "learning-rate-jump", "the learning rate rose at step 2."),
        noted(3, "written-weights", "w was written."),
    ]
    steps = [recorded.step(number, 2.0) for number in range(1, 4)]
    summary = end([recorded.write(tmp_path, *steps, *notes[:count])], tmp_path / "report.html")
    assert summary is not None
    _, good, *lines, report = summary.lines()
    assert good.startswith("good: Nothing to fix")
    assert lines == ([] if line is None else [line])
    assert report.startswith("report: ")
    if count == 2:
        assert Summary.of(summary.runs).lines()[-1].startswith("2 notes, the first: ")


def test_a_note_is_shown_once_beside_mistakes_and_warnings(tmp_path: Path) -> None:
    note = noted(2, "learning-rate-jump", "the learning rate rose at step 2.")
    warning = noted(3, "never-updated", "w stays.") | {"severity": "warning"}
    steps = [recorded.step(number, 2.0) for number in range(1, 4)]
    for more, kinds in (([warning], ["warning", "note"]), ([mistake(7)], ["mistake", "note"])):
        lines = Summary.of([Run.read(recorded.write(tmp_path, *steps, note, *more))]).lines()[1:]
        assert [line.partition(":")[0] for line in lines] == kinds


def test_lines_are_wrapped_to_the_width_and_indented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = Summary.of([Run.read(diverging(tmp_path, mistakes=1))])
    monkeypatch.setenv("COLUMNS", "10000")
    whole = summary.lines()
    assert not any("\n" in line for line in whole)
    for columns, width in (("60", 60), ("", 120)):  # in a pipe
        monkeypatch.setenv("COLUMNS", columns)
        printed = [f"castwise: {line}" for line in summary.lines()]
        _, _, finding = printed
        first, *others = finding.splitlines()
        assert others
        assert all(len(line) <= width for line in (first, *others))
        assert all(re.match(r" {10}\S", line) for line in others)
        assert [" ".join(line.split()) for line in printed] == [f"castwise: {line}" for line in whole]


def test_the_path_of_the_report_is_never_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    page = tmp_path / "a name with spaces" / "report.html"
    assert Summary(report=page).lines() == [f"report: {page}"]


def test_runs_of_several_models_are_summed_up_and_the_gravest_finding_comes_first(tmp_path: Path) -> None:
    runs = [Run.read(recorded.healthy(tmp_path / "critic", steps=300)), Run.read(diverging(tmp_path / "generator"))]
    summary = Summary.of(runs)
    assert summary.lines()[0] == "308 steps; skipped: 5 overflow"
    assert summary.first_finding is not None
    assert summary.first_finding.severity == "critical"
    assert summary.lines()[1].startswith("critical: generator: Training diverged")


def test_a_record_for_programs_has_all_findings(tmp_path: Path) -> None:
    summary = Summary.of([Run.read(diverging(tmp_path / "GPT", mistakes=1))])
    read = json.loads(json.dumps(summary.record(), allow_nan=False))
    assert read["report"] is None
    assert [each["line"] for each in read["mistakes"]] == [1]
    (run,) = read["runs"]
    assert (run["run"], run["steps"], run["skipped"]) == ("GPT", 8, {"overflow": 3})
    assert (run["format"], run["loss"]["first"]) == ("fp16", summary.runs[0].steps[0].loss)
    assert run["findings"][0]["severity"] == "critical"
    assert all(isinstance(value, (int, float, str, list)) for value in run["findings"][0]["evidence"].values())
    assert run["findings"][0]["diagnoses"] == []


@pytest.mark.parametrize(
    ("folder", "text", "seen"),
    [
        ("/me", "at /me/train.py:3, not /data/me/x.py", "at train.py:3, not /data/me/x.py"),
        ("/me", "(/me/a b.py)", "(a b.py)"),
        ("/", "at /me/train.py:3", "at /me/train.py:3"),
    ],
)
def test_paths_are_shown_from_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, folder: str, text: str, seen: str
) -> None:
    monkeypatch.setattr("os.getcwd", lambda: folder)
    assert _seen_from_here(text) == seen


def test_paths_are_whole_where_the_current_folder_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> str:
        raise FileNotFoundError

    monkeypatch.setattr("os.getcwd", gone)
    assert _seen_from_here("at /me/train.py:3") == "at /me/train.py:3"


def test_a_diagnosis_is_reported_with_the_ranges_of_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10000")
    text = (
        "forward: 1: aten.exp gives inf\n  at C:\\net.py:31: x.exp(): 3\n  input 0: float16 (4, 8), -1 .. 20\n"
        "  input 1: float16 (4,), 0 .. 1\n  output: float16 (4, 8), 0.5 .. 2, 4 inf\nlook at its inputs"
    )
    found = {"kind": "diagnosis", "step": 2, "cause": "non-finite loss", "phase": "forward", "module": "1"}
    found |= {"op": "aten.exp", "text": text, "advice": "look at its inputs"}
    found |= {"tried": "finite without sample 3", "sample": "sample 3 of the batch, dataset[217]"}
    steps = [recorded.step(1, 2.0), recorded.step(2, 2.0, "non-finite loss"), recorded.step(3, 1.0)]
    run = Run.read(recorded.write(tmp_path, *steps, found))
    summary = Summary.of([run])
    (diagnosis,) = summary.record()["runs"][0]["findings"][0]["diagnoses"]
    inputs = ["float16 (4, 8), -1 .. 20", "float16 (4,), 0 .. 1"]
    known = {"module": "1", "op": "aten.exp", "line": "C:\\net.py:31", "inputs": inputs, "code": ""}
    samples = [{"step": 2, "sample": "sample 3 of the batch, dataset[217]"}]
    assert diagnosis == known | {"tried": "finite without sample 3", "samples": samples, "capsule": ""}
    parts = [line.strip() for line in summary.lines()[1].splitlines()[1:]]
    assert parts == [
        "Step 2: forward: 1: aten.exp gives inf",
        "x.exp(): 3",
        "Sample 3 of the batch, dataset[217].",
        "Look at its inputs.",
        "Tried on the batch of step 2: finite without sample 3.",
        "Input 0: float16 (4, 8), -1 .. 20.",
        "Input 1: float16 (4,), 0 .. 1.",
    ]
    write_report([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Tried on the batch of step 2: finite without sample 3.</p>" in page
    assert "<li>Step 2: sample 3 of the batch, dataset[217]</li>" in page
    printed = io.StringIO()
    print_runs(list(summary.runs), new_console(200, printed))
    assert "  Step 2: input 0: float16 (4, 8), -1 .. 20\n" in printed.getvalue()


@pytest.mark.parametrize(
    ("levels", "healthy", "mistaken", "lost"),
    [
        ([], False, False, False),
        (["mistake"], False, True, False),
        (["critical"], False, False, True),
        (["warning"], False, False, True),
        (["mistake", "critical"], False, True, True),
    ],
)
def test_runs_fail_by_what_is_asked_for(
    levels: list[Level], healthy: bool, mistaken: bool, lost: bool, tmp_path: Path
) -> None:
    good = recorded.healthy(tmp_path / "good", steps=300)
    wrong = recorded.write(tmp_path / "wrong", recorded.step(1, 2.0), mistake(3))
    folders = good, wrong, diverging(tmp_path / "lost")
    assert [Summary.of([Run.read(folder)]).fails(levels) for folder in folders] == [healthy, mistaken, lost]


def test_a_record_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "monitor.jsonl").write_text("no record\n\n")
    with pytest.warns(RuntimeWarning, match="could not write the report in .*, because a record cannot be read: "):
        assert end([tmp_path], tmp_path / "report.html") is None
