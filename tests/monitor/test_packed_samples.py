"""Files of castwise 0.2 are read as it read them: `of_0_2` holds five runs that it recorded, and its verdicts."""

from __future__ import annotations

import base64
import json
import lzma
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.report.test_report import page_of

from castwise.monitor import JSONL, Run
from castwise.monitor import _packed_samples as packed_samples
from castwise.monitor._packed_samples import PackedSamples
from castwise.report._summary import Summary

OF_0_2 = Path(__file__).parent / "of_0_2"
CHANGED = re.compile("^Nothing to fix|overflow")
HEALTHY = ", and no loss or gradient of a step that was taken was inf or NaN."
NEW = {
    "fp16": [
        "Nothing to fix: 24 steps, 7 of them skipped while the scale was found",
        "7 steps skipped for overflow: the normal cost of finding the scale.",
    ],
    "bf16": ["Nothing to fix: 24 steps"],
    "quantized": ["Nothing to fix: 12 steps"],
}
KINDS = ["fp16", "bf16", "ranks", "quantized", "fault"]


def rewritten(run: Run, folder: Path) -> Run:
    """The run as this castwise writes and reads it."""
    assert run.about is not None
    with JSONL(folder) as sink:
        for record in (run.about, *run.steps, *run.samples, *run.diagnoses, *run.mistakes):
            sink.write_record(record)
    return Run.read(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_the_verdict_is_that_of_0_2(kind: str) -> None:
    summary = Summary.of([Run.read(OF_0_2 / f"{kind}.jsonl")]).record()["runs"][0]
    written = json.loads((OF_0_2 / f"{kind}.json").read_text())
    for new in ("format", "loss"):  # since then, what was a note about scaling names the format too
        del summary[new]
    for finding in summary["findings"]:
        finding["text"] = finding["text"].replace("The run computed in bf16.", "The loss was not scaled.")
    for finding in written["findings"]:
        finding["diagnoses"] = [
            {**diagnosis, "tried": "", "samples": [], "capsule": ""} for diagnosis in finding["diagnoses"]
        ]  # new since then
    kept = []
    for verdict in (summary, written):
        kept.append([finding for finding in verdict["findings"] if not CHANGED.search(finding["text"])])
    # What is said of a healthy run, and of overflows now and then, has changed on purpose.
    said = [finding["text"] for finding in summary["findings"] if CHANGED.search(finding["text"])]
    assert said == [f"{text}{HEALTHY if text.startswith('Nothing') else ''}" for text in NEW.get(kind, [])]
    assert kept[0] == kept[1]
    assert {**summary, "run": None, "findings": []} == {**written, "run": None, "findings": []}


@pytest.mark.parametrize("kind", KINDS)
def test_what_0_2_recorded_is_the_same_in_a_file_of_today(kind: str, tmp_path: Path) -> None:
    run = Run.read(OF_0_2 / f"{kind}.jsonl")
    again = rewritten(run, tmp_path)
    assert len(run.samples) > 2
    for name in ("about", "steps", "samples", "diagnoses"):
        assert repr(getattr(again, name)) == repr(getattr(run, name))  # NaN does not equal NaN


def test_the_page_is_the_same_for_a_file_of_today(tmp_path: Path) -> None:
    run = Run.read(OF_0_2 / "fault.jsonl")
    again = rewritten(run, tmp_path / "of_0_2")
    pages = [page_of(tmp_path, one).text.replace(str(one.path), "the record") for one in (run, again)]
    assert pages[0] == pages[1]


def test_a_sample_of_a_skipped_step_has_some_of_the_names() -> None:
    run = Run.read(OF_0_2 / "fp16.jsonl")
    skipped = {step.step for step in run.steps if step.skipped}
    assert skipped
    for sample in run.samples:
        assert len(sample.gradients) == 14
        assert bool(sample.weights) == (sample.step not in skipped)
        assert list(sample.modules)[:2] == ["tok", "blocks.0.norm"]


def packed(content: bytes) -> str:
    return base64.b85encode(lzma.compress(content)).decode()


def file_with(tmp_path: Path, change: Any) -> Path:
    """A file of 0.2 with a change of its first sample, which is in the fourth line."""
    lines = (OF_0_2 / "bf16.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines[:4]]
    assert kinds == ["run", "step", "names", "sample"]
    lines[3] = json.dumps(change(json.loads(lines[3])))
    (tmp_path / "monitor.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def with_columns(**more: Any) -> Any:
    """A change of what is packed in a sample."""

    def change(sample: dict[str, Any]) -> dict[str, Any]:
        columns = json.loads(lzma.decompress(base64.b85decode(sample["packed"])))
        for name, value in more.items():
            columns[name] = {**columns[name], **value} if name == "gradients" else value
        return {**sample, "packed": packed(json.dumps(columns).encode())}

    return change


@pytest.mark.parametrize("rows", [3, [0], "gradients", {"gradients": [99]}, {"weights": [-1]}, {"activations": 0}])
def test_rows_that_are_wrong_are_no_record(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"monitor\.jsonl, line 4 is not a record of a monitor"):
        Run.read(file_with(tmp_path, with_columns(rows=rows)))


@pytest.mark.parametrize("column", ["numel", "zero", "nonfinite", "largest", "smallest", "lowest", "counts"])
@pytest.mark.parametrize("wrong", [[], [-5000] * 15, ["1"] * 15, [[0.5]] * 15, 3, None, [math.inf] * 15])
def test_a_column_that_is_wrong_is_no_record(column: str, wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"monitor\.jsonl, line 4 is not a record of a monitor"):
        Run.read(file_with(tmp_path, with_columns(gradients={column: wrong})))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("no base 85: \x00", "it cannot be unpacked"),
        (base64.b85encode(b"no xz").decode(), "it cannot be unpacked"),
        (lambda: packed(b"[" * 100_000), "it cannot be unpacked"),
        (packed(b"{}"), "its columns are not those of a sample"),
        (lambda: packed(b" " * ((64 << 20) + 1)), "it has more than 67,108,864 bytes, the limit for a record"),
        (base64.b85encode(lzma.compress(b"{}" * 99)[:-9]).decode(), "it is truncated"),
        (3, "a sample: packed must be a string"),
    ],
)
def test_what_cannot_be_unpacked_is_no_record(data: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"monitor\.jsonl, line 4 is not a record of a monitor: .*{message}"):
        Run.read(file_with(tmp_path, lambda sample: {**sample, "packed": data() if callable(data) else data}))


def test_many_samples_that_each_unpack_to_less_than_the_limit_are_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_samples, "MOST_BYTES", 1 << 18)
    lines = (OF_0_2 / "bf16.jsonl").read_text().splitlines()
    sample = json.loads(lines[3])
    columns = lzma.decompress(base64.b85decode(sample["packed"]))
    padded = {**sample, "packed": packed(columns + b" " * 250_000)}
    given = [json.dumps({**padded, "step": number}) for number in range(1, 400)]
    (tmp_path / "monitor.jsonl").write_text("\n".join([*lines[:3], *given]) + "\n")
    size, unpacked = os.stat(tmp_path / "monitor.jsonl").st_size, 0
    decompressed = PackedSamples._decompressed

    def count(self: PackedSamples, content: bytes) -> bytes:
        nonlocal unpacked
        got = decompressed(self, content)
        unpacked += len(got)
        return got

    monkeypatch.setattr(PackedSamples, "_decompressed", count)
    with pytest.raises(ValueError, match=r"samples have more than .* bytes, the limit for a file of this size"):
        Run.read(tmp_path)
    assert unpacked <= (1 << 18) + 64 * size


def test_owners_of_names_are_looked_up_by_name_and_not_for_each_sample() -> None:
    owned = {"b": ["b.1", "b.0"], "a": ["a.0", "b.0"], "c": []}
    samples = PackedSamples(0)
    assert samples.plain({"kind": "names", "owned": owned}) is None
    samples._names = None  # type: ignore[assignment]
    assert samples._owned(["a.0", "b.0", "b.1"]) == {"b": ["b.1", "b.0"], "a": ["a.0", "b.0"]}
