"""`castwise report`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.monitor import recorded
from typer.testing import CliRunner

from castwise._cli import app
from castwise.monitor import _run_files as run_files


def report(*options: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *map(str, options)])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a demo leaves it: a run in each of its folders."""
    folder = tmp_path_factory.mktemp("runs")
    recorded.healthy(folder / "good", steps=1000, layers=1)
    recorded.troubled(folder / "bad", steps=2000, layers=1, name="[red]weird[/red]")
    return folder


def test_a_page_is_written_into_the_run_or_where_it_is_asked_for(runs: Path, tmp_path: Path) -> None:
    code, printed = report(runs / "good")
    assert (code, printed) == (0, f"wrote {runs / 'good' / 'report.html'}\n")
    assert "fp16 is safe here" in (runs / "good" / "report.html").read_text()
    for given in ([runs / "good" / "monitor.jsonl.gz", runs / "bad"], [runs]):
        assert report(*given, "-o", tmp_path / "both.html")[0] == 0
        page = (tmp_path / "both.html").read_text()
        assert 'id="timeline-2"' in page
        assert 'id="timeline-3"' not in page


def test_a_name_that_no_encoding_knows_is_printed(runs: Path, tmp_path: Path) -> None:
    lines = (line.replace('"parameters": ["', '"parameters": ["\\ud800') for line in recorded.lines_in(runs / "bad"))
    recorded.write_lines(tmp_path / "monitor.jsonl.gz", *lines)
    code, printed = report(tmp_path, "--text")
    assert code == 0
    assert "\\ud800" in printed


def test_the_essentials_are_printed(runs: Path) -> None:
    code, printed = report("--text", runs / "bad")
    assert code == 0
    text = " ".join(printed.split())
    assert "2,000 steps; 3 skipped; scale 2^" in text
    assert "non-finite loss 1 1,777 1,777" in text
    assert "overflow 2" in text
    assert "blocks.0.attn.qkv.weight" in text
    assert "warning: The loss was inf or NaN at 1 step, first at step 1,777" in text
    assert "[red]weird[/red]" in text
    assert "note: Keep the weights in fp32: bf16 weights would lose 12% of updates." in text
    assert "optimizer = castwise.MasterWeights(optimizer, model). lost updates: 12%;" in text
    assert not (runs / "bad" / "report.html").exists()


def test_the_essentials_are_json_for_programs(runs: Path, tmp_path: Path) -> None:
    code, printed = report("--json", runs / "bad", runs / "good")
    found = json.loads(printed)
    assert code == 0
    assert [run["run"] for run in found["runs"]] == ["bad", "good"]
    assert found["runs"][0]["findings"][0]["severity"] in {"critical", "warning"}
    assert report("--json", runs / "bad", runs / "good", "-o", tmp_path / "x") == (0, f"wrote {tmp_path / 'x'}\n")
    assert (tmp_path / "x").read_text() == printed


def test_the_essentials_are_written_to_a_file(runs: Path, tmp_path: Path) -> None:
    _, printed = report("--text", runs / "bad")
    assert report("--text", runs / "bad", "-o", tmp_path / "x") == (0, f"wrote {tmp_path / 'x'}\n")
    assert (tmp_path / "x").read_text() == printed
    code, refused = report("--text", runs / "bad", "-o", tmp_path)
    assert (code, refused) == (2, f"castwise report: cannot write {tmp_path}: Is a directory\n")


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), ("0", 120), ("many", 120)])
def test_text_in_a_pipe_is_as_wide_as_columns_says(
    columns: str, widest: int, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert max(map(len, report("--text", runs / "bad")[1].splitlines())) == widest


def test_the_module_that_a_diagnosis_names_is_listed_first_and_marked(tmp_path: Path) -> None:
    found = dict.fromkeys(("phase", "op", "text", "advice"), "")
    found |= {"kind": "diagnosis", "cause": "overflow", "module": "blocks.0.attn"}
    broken = recorded.sample(1, 2.0, {"a": -16.0}, {}, not_finite=("a",))
    run = recorded.write(tmp_path, recorded.step(1, 2.0, "overflow"), broken, {**found, "step": 1})
    code, printed = report("--text", run)
    assert code == 0
    table = printed[printed.index("Worst modules, in fp16") :].splitlines()[2:4]
    assert [" ".join(line.split()) for line in table] == ["blocks.0.attn (diagnosed)", "a none finite"]
    assert "all zero" not in printed


def test_where_ranks_go_on_alone_is_printed_and_on_the_page(tmp_path: Path) -> None:
    recorded.write_lines(
        tmp_path / "monitor.jsonl.gz",
        '{"kind": "run", "format": 1, "settings": {}}',
        '{"kind": "step", "step": 1, "skipped": false}',
        '{"kind": "alone", "step": 1, "why": "no answer from rank 1 for 10 s at step 1"}',
    )
    why = "no answer from rank 1 for 10 s at step 1"
    assert f"from step 1 on, ranks are not recorded together: {why}" in " ".join(report(tmp_path, "--text")[1].split())
    report(tmp_path)
    assert "ranks alone from step 1" in (page := (tmp_path / "report.html").read_text())
    assert why in page


def test_a_run_that_has_just_begun_is_printed(tmp_path: Path) -> None:
    code, printed = report("--text", recorded.write(tmp_path))
    assert code == 0
    assert "0 steps; 0 skipped; 0 samples" in printed
    assert "Too little was recorded" in printed


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            ["missing"],
            "castwise report: there is no {}/missing: give the folder of a run, which has a monitor.jsonl.gz\n",
        ),
        (
            ["."],
            "castwise report: there is no monitor.jsonl.gz in {}: castwise.Monitor(..., sinks=['{}']) writes one\n",
        ),
        (["n" * 300], f"castwise report: cannot read {{}}/{'n' * 300}: File name too long; check the path\n"),
        (["broken.jsonl"], "castwise report: {}/broken.jsonl, line 1 is not a record of a monitor: "),
        (["good", "-o", "missing/page.html"], "castwise report: cannot write {}/missing/page.html: No such file"),
    ],
)
def test_what_cannot_be_done_is_one_line(given: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text("x\ny\n")
    if "good" in given:
        recorded.write(tmp_path / "good")
    code, printed = report(*(each if each == "-o" else tmp_path / each for each in given))
    assert code == 2
    assert printed.startswith(text.replace("{}", str(tmp_path)))
    assert printed.count("\n") == 1


def test_a_missing_extra_is_one_line_that_names_it(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [each for each in sys.modules if each.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert report(runs / "bad") == (2, "castwise report: a report needs plotly: pip install 'castwise[report]'\n")
    assert report("--text", runs / "bad")[0] == 0


def test_without_an_argument_the_latest_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "castwise-run"
    for name, steps in (("20261123-133208-1f3a", 10), ("20261123-140000-00ab", 20)):
        recorded.healthy(out / name / "Net", steps=steps, layers=1)
        (out / name / ".run-0123456789abcdef").touch()
    for given in ([], ["castwise-run"], ["castwise-run/20261123-140000-00ab"]):
        assert report(*given) == (0, "wrote castwise-run/20261123-140000-00ab/report.html\n")
        assert "20 steps" in report(*given, "--text")[1]
    assert "10 steps" in report("castwise-run/20261123-133208-1f3a", "--text")[1]
    assert report(out / "missing")[0] == 2


def test_a_run_that_begins_meanwhile_is_not_mixed_into_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(name: str, steps: int) -> None:
        recorded.healthy(tmp_path / name / "Net", steps=steps, layers=1)
        (tmp_path / name / ".run-0123456789abcdef").touch()

    def look_up(folder: Path) -> Path:
        found = run_in(folder)
        begin("20261123-140000-00ab", 20)
        return found

    run_in = run_files.run_in
    monkeypatch.setattr(run_files, "run_in", look_up)
    begin("20261123-133208-1f3a", 10)
    assert report(tmp_path) == (0, f"wrote {tmp_path}/20261123-133208-1f3a/report.html\n")
    page = (tmp_path / "20261123-133208-1f3a" / "report.html").read_text()
    assert "20261123-133208-1f3a/Net/monitor.jsonl.gz" in page
    assert "20261123-140000-00ab" not in page


def test_without_an_argument_and_without_runs_the_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed = report()
    assert (code, printed.splitlines()[0]) == (
        2,
        "castwise report: there is no castwise-run: give the folder of a run, which has a monitor.jsonl.gz",
    )


@pytest.mark.parametrize("kind", [[], ["--json"], ["--text"]])
def test_a_record_or_any_other_file_is_not_replaced_by_a_report(kind: list[str], tmp_path: Path) -> None:
    recorded.healthy(tmp_path / "run", steps=10, layers=1)
    (tmp_path / "notes").write_text("mine")
    for file in (tmp_path / "run" / "monitor.jsonl.gz", tmp_path / "notes"):
        before = file.read_bytes()
        code, printed = report(tmp_path / "run", *kind, "-o", file)
        assert code == 2
        assert printed.startswith(f"castwise report: cannot write {file}: it exists and is not a")
        assert file.read_bytes() == before
    for _ in range(2):
        assert report(tmp_path / "run", *kind, "-o", tmp_path / "new")[0] == 0
