"""Runs that were recorded, read back."""

from __future__ import annotations

import gzip
import json
import math
import re
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor import recorded

import castwise
from castwise.monitor import JSONL, Run
from castwise.monitor import _gzip_members as gzip_members
from castwise.monitor._gzip_members import HEADER as HEADER_OF_MEMBER
from castwise.monitor._gzip_members import MOST_BYTES, gzip_member
from castwise.monitor._records import AloneRecord, DiagnosisRecord, MistakeRecord, RunRecord, SampleRecord, StepRecord
from castwise.report._summary import Summary

HEADER = {"kind": "run", "format": 1, "castwise": "0", "torch": "0", "device": "cpu", "settings": {"every": 10}}


def write(folder: Path, *records: dict[str, Any]) -> None:
    with JSONL(folder) as sink:
        for record in records:
            sink(record)


def numbers(records: Sequence[StepRecord | SampleRecord]) -> list[int]:
    return [record.step for record in records]


def write_text(path: Path, *records: object) -> None:
    """Write lines of JSON, as castwise 0.1 and 0.2 wrote files, or an editor does."""
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))


def test_a_run_comes_back_as_it_was_recorded(tmp_path: Path) -> None:
    steps = [
        {"kind": "step", "step": n, "skipped": False, "loss": loss}
        for n, loss in ((1, 0.5), (2, math.inf), (3, -math.inf))
    ]
    sample = {
        "kind": "sample",
        "step": 1,
        "scale": 1.0,
        "modules": {"nan": recorded.stats(-10.0, 1.0, nonfinite=math.inf)},
    }
    texts = dict.fromkeys(("cause", "phase", "op", "text", "advice"), "")
    diagnosis = {"kind": "diagnosis", "step": 2, **texts, "module": "inf"}
    write(tmp_path, HEADER, *steps, sample, diagnosis, {"kind": "end", "step": 3})
    for path in (tmp_path, tmp_path / "monitor.jsonl.gz", str(tmp_path)):
        run = Run.read(path)
        assert (run.about, run.settings) == (RunRecord.from_json(HEADER), {"every": 10})
        assert run.diagnoses == [DiagnosisRecord.from_json(diagnosis)]
        assert (run.samples[0].to_json()["modules"], run.ended) == (sample["modules"], True)
        written = [{name: step.to_json()[name] for name in steps[0]} for step in run.steps]
        assert written == steps


def test_nan_is_a_number_again(tmp_path: Path) -> None:
    write(tmp_path, HEADER, {"kind": "step", "step": 1, "skipped": True, "loss": math.nan, "cause": "overflow"})
    (step,) = Run.read(tmp_path).steps
    assert step.loss is not None
    assert math.isnan(step.loss)
    assert step.cause == "overflow"


def test_a_broken_last_line_is_ignored(tmp_path: Path) -> None:
    write_text(tmp_path / "monitor.jsonl", HEADER, {"kind": "step", "step": 1, "skipped": False})
    with open(tmp_path / "monitor.jsonl", "a") as file:
        file.write('{"kind": "step", "st')
    run = Run.read(tmp_path)
    assert numbers(run.steps) == [1]
    assert not run.ended


def test_a_file_that_is_cut_at_any_byte_is_read_up_to_its_last_whole_member(tmp_path: Path) -> None:
    path = tmp_path / "monitor.jsonl.gz"
    ends = [0]
    with JSONL(tmp_path) as sink:
        for record in (HEADER, *({"kind": "step", "step": number, "loss": number / 7} for number in (1, 2, 3))):
            sink(record)
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        run = Run.read(tmp_path)
        known = sum(end <= size for end in ends[1:])
        assert (run.about is not None) == (known > 0)
        assert numbers(run.steps) == list(range(1, known))
        path.write_bytes(whole[:size] + b"\0" * 50)  # as a power cut may leave it; a member may end in zeros
        assert len(Run.read(tmp_path).steps) in (max(0, known - 1), known)


def test_a_damaged_member_before_the_last_is_named(tmp_path: Path) -> None:
    write(tmp_path, HEADER, *({"kind": "step", "step": number, "loss": number / 7} for number in range(1, 9)))
    path = tmp_path / "monitor.jsonl.gz"
    content = bytearray(path.read_bytes())
    content[content.find(HEADER_OF_MEMBER, 1) + len(HEADER_OF_MEMBER) + 9] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"monitor\.jsonl\.gz, line 2 is not a record of a monitor: it is damaged: "):
        Run.read(tmp_path)


def test_a_file_that_another_program_compressed_is_read(tmp_path: Path) -> None:
    steps = [{"kind": "step", "step": number} for number in range(1, 4)]
    text = "".join(f"{json.dumps(record)}\n" for record in (HEADER, *steps)).encode()
    (tmp_path / "monitor.jsonl.gz").write_bytes(gzip.compress(text))
    assert numbers(Run.read(tmp_path).steps) == [1, 2, 3]
    (tmp_path / "monitor.jsonl.gz").write_bytes(gzip.compress(text)[:-1])
    with pytest.raises(ValueError, match="line 1 is not a record of a monitor: it is truncated"):
        Run.read(tmp_path)


def test_members_that_unpack_to_too_much_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "monitor.jsonl.gz"
    monkeypatch.setattr(gzip_members, "MOST_BYTES", 1 << 16)
    step = json.dumps({"kind": "step", "step": 1})
    path.write_bytes(gzip_member(step.encode() + b" " * (1 << 16)))
    with pytest.raises(ValueError, match=r"line 1 .*: it has more than 65,536 bytes, the limit for a record"):
        Run.read(tmp_path)
    path.write_bytes(gzip_member(step.encode() + b" " * 60_000 + b"\n") * 400)
    unpacked, decompressobj = 0, gzip_members.zlib.decompressobj

    class Counting:
        def __init__(self, **options: Any) -> None:
            self.inner = decompressobj(**options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def decompress(self, *given: Any) -> bytes:
            nonlocal unpacked
            content = self.inner.decompress(*given)
            unpacked += len(content)
            return content

    monkeypatch.setattr(gzip_members.zlib, "decompressobj", Counting)
    with pytest.raises(ValueError, match=r"the records have more than .* bytes, the limit for a file of this size"):
        Run.read(tmp_path)
    assert unpacked <= (1 << 16) + 64 * path.stat().st_size + 1


def test_a_record_of_castwise_0_2_in_the_same_folder_is_the_beginning(tmp_path: Path) -> None:
    first = [{"kind": "step", "step": number, "loss": 1.0} for number in (1, 2, 3)]
    write_text(tmp_path / "monitor.jsonl", HEADER, *first)
    write(tmp_path, HEADER, *({"kind": "step", "step": number, "loss": 2.0} for number in (3, 4)))
    assert [(step.step, step.loss) for step in Run.read(tmp_path).steps] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert numbers(Run.read(tmp_path / "monitor.jsonl").steps) == [1, 2, 3]


@pytest.mark.parametrize("end", ["", '\n{"kind": "end"}\n'], ids=["unfinished", "finished"])
def test_a_line_without_end_is_refused_and_not_read(end: str, tmp_path: Path) -> None:
    path = tmp_path / "monitor.jsonl"
    write_text(path, HEADER, {"kind": "step", "step": 1})
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
        file.truncate(300 << 20)  # sparse
    with path.open("a") as file:
        file.write(end)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"line 3 .* it has more than 67,108,864 bytes, the limit for a record"):
            Run.read(tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3 * MOST_BYTES


def test_a_first_line_that_never_was_a_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "monitor.jsonl").write_text('{"kind": "ru')
    assert Run.read(tmp_path).steps == []
    (tmp_path / "monitor.jsonl").write_bytes(b"\0" * 100)  # as a power cut may leave it
    assert Run.read(tmp_path).steps == []
    (tmp_path / "monitor.jsonl").write_bytes(b"{\n{")
    with pytest.raises(ValueError, match=r"monitor\.jsonl, line 1 is not a record of a monitor"):
        Run.read(tmp_path)
    (tmp_path / "monitor.jsonl").write_bytes(b"\x80\x04\x95" + b"a" * 100)
    with pytest.raises(ValueError, match=r"monitor\.jsonl, line 1 is not a record of a monitor"):
        Run.read(tmp_path)


def test_after_a_checkpoint_later_records_count(tmp_path: Path) -> None:
    facts = {"skipped": False, "scale": 1.0}
    both = [{"kind": kind, "step": n, "loss": 1, **facts} for n in (1, 2, 3) for kind in ("step", "sample")]
    again = [{"kind": "step", "step": n, "loss": 2, **facts} for n in (3, 4)]
    write(tmp_path, HEADER, *both, {"kind": "end", "step": 3}, HEADER, *again)
    run = Run.read(tmp_path)
    assert [(step.step, step.loss) for step in run.steps] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert numbers(run.samples) == [1, 2]
    assert not run.ended


STATS = recorded.stats(-10.0, 1.0)
WRONG = [
    ({"kind": "step", "step": "1", "skipped": False}, "a step: step must be an integer >= 0, got '1'"),
    ({"kind": "step", "step": 1, "skipped": 0}, "a step: skipped must be true or false, got 0"),
    ({"kind": "step", "step": 1, "skipped": True, "cause": {}}, "a step: cause must be a string, got {}"),
    ({"kind": "step", "step": 1, "skipped": True, "parameters": "a"}, "a step: parameters must be a list, got 'a'"),
    (
        {"kind": "step", "step": 1, "skipped": True, "parameters": [[]]},
        "a step: parameters: 0 must be a string, got []",
    ),
    ({"kind": "step", "step": 1, "skipped": True, "loss": True}, "a step: loss must be a number, or 'nan', "),
    ({"kind": "step", "step": 1, "skipped": True, "loss": 10**400}, "a step: loss must be a number, or 'nan', "),
    ({"kind": "sample", "step": 1, "scale": 0.0}, "a sample: scale must be a finite number > 0, got 0.0"),
    ({"kind": "sample", "step": 1, "scale": 1, "modules": []}, "a sample: modules must be an object, got []"),
    (
        {"kind": "sample", "step": 1, "scale": 1, "modules": {"a": {**STATS, "numel": -1}}},
        "a sample: modules: a: numel must be an integer >= 0, got -1",
    ),
    (
        {
            "kind": "sample",
            "step": 1,
            "scale": 1,
            "modules": {"a": {**STATS, "exponents": {"lowest": 1000, "counts": [0] * 99}}},
        },
        "a sample: modules: a: exponents must be at most 1023, got 1098",
    ),
    ({**HEADER, "format": "1"}, "a run: format must be an integer >= 1, got '1'"),
    ({**HEADER, "time": 1e20}, "a run: time must be seconds since 1970, less than 17179869184, got 1e+20"),
    ({"kind": "step", "step": 1, "skipped": "x" * 99}, f"a step: skipped must be true or false, got '{'x' * 59}..."),
]


@pytest.mark.parametrize(("record", "message"), WRONG)
def test_what_a_record_holds_is_checked(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, HEADER, record, HEADER)
    with pytest.raises(
        ValueError, match=re.escape(f"monitor.jsonl.gz, line 2 is not a record of a monitor: {message}")
    ):
        Run.read(tmp_path)


def test_what_a_later_castwise_records_besides_is_ignored(tmp_path: Path) -> None:
    later = [{"kind": "weather", "of": ["nan"]}, {"kind": "step", "step": 1, "skipped": False, "new": "nan"}]
    write(tmp_path, HEADER, *later)
    assert Run.read(tmp_path).steps == [StepRecord(1)]


@pytest.mark.parametrize(
    "line",
    [
        *("no json", "[1]", '{"step": 1}', '{"kind": "run", "format": 1}', '{"kind": "step", "scale": 1}'),
        *('{"kind": "sample", "step": 1}', '{"kind": "diagnosis", "step": 1, "cause": "overflow"}'),
    ],
)
def test_a_line_that_is_no_record_is_named(line: str, tmp_path: Path) -> None:
    recorded.write_lines(tmp_path / "monitor.jsonl.gz", json.dumps(HEADER), line, json.dumps(HEADER))
    with pytest.raises(ValueError, match=r"monitor\.jsonl\.gz, line 2 is not a record of a monitor"):
        Run.read(tmp_path)


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path, HEADER | {"format": 4})
    with pytest.raises(ValueError, match="has format 4, but this castwise reads formats up to 3: upgrade castwise"):
        Run.read(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Run.read(tmp_path / "nowhere")


def about(path: Path) -> RunRecord:
    run = Run.read(path)
    assert run.about is not None
    return run.about


def test_a_clock_before_1970_leaves_a_record_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(1, 1)
    for name, now in (("early", -1e9), ("late", 1e12)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        with castwise.Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), sinks=[tmp_path / name]):
            pass
    monkeypatch.undo()
    assert [about(tmp_path / name).time for name in ("early", "late")] == [0.0, 2.0**34 - 1]
    write(tmp_path / "older", HEADER | {"time": -1e9})  # as castwise 0.2 has written it
    assert about(tmp_path / "older").time == 0.0


def test_mistakes_are_read_in_linear_time(tmp_path: Path) -> None:
    compared = 0

    class Counting(MistakeRecord):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return MistakeRecord.__eq__(self, other)

        def __hash__(self) -> int:
            return MistakeRecord.__hash__(self)

    run = Run(tmp_path)
    for line in [*range(300), *range(300)]:
        run._add(Counting("x", "", "", "", line, ""))
    assert len(run.mistakes) == 300
    assert compared == 300  # each repeated one with the first


def test_lost_records_are_counted(tmp_path: Path) -> None:
    write(tmp_path, HEADER, {"kind": "lost", "records": 7}, {"kind": "lost", "records": 2})
    assert Run.read(tmp_path).lost == 9


def test_where_ranks_go_on_alone_is_read_and_shown(tmp_path: Path) -> None:
    alone = {"kind": "alone", "step": 2, "why": "no answer from rank 1 at step 2"}
    write(tmp_path, HEADER, {"kind": "step", "step": 1}, {"kind": "step", "step": 2}, alone)
    run = Run.read(tmp_path)
    assert run.alone == [AloneRecord(2, "no answer from rank 1 at step 2")]
    assert Summary.of([run]).record()["runs"][0]["alone"] == ["no answer from rank 1 at step 2"]
    write(tmp_path, {"kind": "step", "step": 2})  # from a checkpoint, with all ranks
    assert Run.read(tmp_path).alone == []
