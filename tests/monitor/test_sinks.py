"""Records survive what happens to the process that writes them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.monitor import recorded
from tests.monitor.recorded import records_in

from castwise.monitor import JSONL, Run, Sinks, TensorBoard
from castwise.monitor import _tensorboard_events as tensorboard_events
from castwise.monitor._gzip_members import HEADER, gzip_member
from castwise.monitor._records import (
    DiagnosisRecord,
    EndRecord,
    Exponents,
    FormatFit,
    RunRecord,
    SampleRecord,
    Stats,
    StepRecord,
    Update,
)

WRITE_FOR_EVER = """
import itertools, sys
from castwise.monitor._sinks import JSONL
sink = JSONL(sys.argv[1])
for step in itertools.count(1):
    sink({"kind": "step", "step": step, "numbers": [step] * 2000})
"""


def step(number: int, **fields: Any) -> dict[str, Any]:
    plain = {
        "scale": 2.0,
        "skipped": False,
        "cause": None,
        "rank": None,
        "parameters": [],
        "grad_norm": None,
        "loss": 0.5,
    }
    return {"kind": "step", "step": number, **plain, "seconds": 0.1, "lr": None, **fields}


def test_a_path_is_a_file_or_the_folder_of_one(tmp_path: Path) -> None:
    for path, written in (("run.jsonl.gz", "run.jsonl.gz"), ("runs/one", "runs/one/monitor.jsonl.gz")):
        with JSONL(tmp_path / path) as sink:
            sink({"kind": "end", "step": 1})
        assert records_in(tmp_path / written) == [{"kind": "end", "step": 1}]


def test_nothing_is_made_before_the_first_record(tmp_path: Path) -> None:
    JSONL(tmp_path / "run").close()
    assert list(tmp_path.iterdir()) == []


def test_the_file_can_be_read_while_it_grows(tmp_path: Path) -> None:
    with JSONL(tmp_path) as sink:
        for number in range(3):
            sink(step(number))
            assert records_in(sink.path)[-1]["step"] == number


def test_what_is_no_number_in_json_is_a_string(tmp_path: Path) -> None:
    with JSONL(tmp_path) as sink:
        sink({"kind": "x", "a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf, "e": (1, 2)}})
    assert records_in(sink.path) == [{"kind": "x", "a": "nan", "b": ["inf", 1.5], "c": {"d": "-inf", "e": [1, 2]}}]


def test_a_killed_process_loses_at_most_the_line_it_was_writing(tmp_path: Path) -> None:
    path = tmp_path / "monitor.jsonl.gz"
    writer = subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(path)])
    while not path.exists() or path.stat().st_size < 100_000:
        assert writer.poll() is None
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL
    steps = [record.step for record in Run.read(path).steps]
    assert steps == list(range(1, len(steps) + 1))
    with JSONL(path) as sink:
        sink({"kind": "end", "step": 0})
    *written, end = records_in(path)
    assert [record["step"] for record in written] == steps
    assert end == {"kind": "end", "step": 0}


@pytest.mark.parametrize("cut", [3, len(HEADER), 40, -9, -1])
@pytest.mark.parametrize("whole", [b"", gzip_member(b'{"kind": "run"}\n')])
def test_a_broken_last_record_is_cut_off(whole: bytes, cut: int, tmp_path: Path) -> None:
    path = tmp_path / "monitor.jsonl.gz"
    path.write_bytes(whole + gzip_member(b'{"kind": "step", "numbers": %s}\n' % str([*range(9999)]).encode())[:cut])
    with JSONL(path) as sink:
        sink({"kind": "end"})
    assert path.read_bytes() == whole + gzip_member(b'{"kind":"end"}\n')


def test_zcat_prints_a_file_also_while_it_grows(tmp_path: Path) -> None:
    with JSONL(tmp_path) as sink:
        sink({"kind": "run"})
        sink({"kind": "end"})
        printed = subprocess.run(["gzip", "-cd", sink.path], capture_output=True, check=True, text=True)
    assert printed.stdout == '{"kind":"run"}\n{"kind":"end"}\n'


def test_a_path_of_a_record_of_castwise_0_2_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"records are compressed: give .*/a\.jsonl\.gz instead of .*/a\.jsonl, or a"):
        JSONL(tmp_path / "a.jsonl")


def test_a_sink_that_fails_is_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    def fail(record: dict[str, Any]) -> None:
        raise OSError("no space left")

    seen: list[dict[str, Any]] = []
    sinks = Sinks([fail, tmp_path, seen.append])
    first, second = (StepRecord.from_json(step(number)) for number in (1, 2))
    with pytest.warns(RuntimeWarning, match=r"sink <function .*fail.* failed and was removed: OSError: no sp"):
        sinks(first)
    sinks(second)  # a second warning would be an error
    sinks.close()
    assert seen == [step(1), step(2)]
    assert Run.read(tmp_path).steps == [first, second]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_file_and_not_the_training(tmp_path: Path) -> None:
    (tmp_path / "monitor.jsonl.gz").symlink_to("/dev/full")
    sinks = Sinks([tmp_path])
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        sinks(EndRecord(1))


def test_what_is_no_sink_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a sink must be a path or a function of one record \(a dict\), got 3"):
        Sinks([3])  # type: ignore[list-item]


def test_tensorboard_finds_what_was_recorded(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def statistics(flush: float) -> Stats:
        formats = dict.fromkeys(("fp16", "bf16", "e4m3", "e5m2"), FormatFit(flush, 0.5, 3.0))
        return Stats(5, 1.0, 0.125, 0.0, 0.0, Exponents(-3, [1, 0, 4]), formats)

    sink = TensorBoard(tmp_path)
    sink.write_record(RunRecord(3, {"model": "GPT"}))
    for record in (step(1), step(2, loss=0.25, skipped=True, cause="overflow", parameters=["a.weight"])):
        sink.write_record(StepRecord.from_json(record))
    modules, outputs = {"a": statistics(0.25), "b": statistics(0.125)}, {"": statistics(0.5)}
    weights = {"a.weight": Update(1e-3, 0.125)}
    sink.write_record(SampleRecord(2, 1.0, 1.5, modules=modules, activations=outputs, weights=weights))
    sink.write_record(DiagnosisRecord(2, "overflow", "forward", "a", "mm", "a made an inf", "lower scale"))
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()

    def curve(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(name)]

    assert curve("step/loss") == [(1, 0.5), (2, 0.25)]
    assert curve("step/skipped") == [(1, 0.0), (2, 1.0)]
    assert curve("gradients/flush fp16") == [(2, 0.25)]
    assert curve("outputs/headroom_bits e5m2") == [(2, 3.0)]
    assert curve("updates/lost_in_bf16") == [(2, 0.125)]
    assert curve("step/grad_norm") == [(2, 1.5)]
    histogram = events.Histograms("log2 gradient/a")[0].histogram_value
    assert list(zip(histogram.bucket_limit, histogram.bucket, strict=True)) == [(-2, 1), (-1, 0), (0, 4)]
    spread = events.Histograms("gradients of each module/flush fp16")[0].histogram_value
    assert (spread.min, spread.max, spread.num) == (0.125, 0.25, 2)
    assert spread.bucket[0] == spread.bucket[-1] == 1
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert texts["diagnosis/text_summary"] == "a made an inf\n\nlower scale"
    assert "|model|GPT|" in texts["settings/text_summary"]
    assert "|gradients|flush fp16|a|0.25|" in texts["worst/text_summary"]


def test_tensorboard_has_as_many_curves_for_a_model_of_any_size(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    names = [f"blocks.{index}" for index in range(300)]
    sink = TensorBoard(tmp_path)
    sink.write_record(StepRecord.from_json(recorded.step(1, 1024.0)))
    sample = recorded.sample(1, 1024.0, dict.fromkeys(names, -20.0), dict.fromkeys(names, 1.0))
    sink.write_record(SampleRecord.from_json(sample))
    sink.close()
    tags = accumulator.EventAccumulator(str(tmp_path)).Reload().Tags()
    assert len(tags["scalars"]) == 23
    assert {tag.split("/")[0] for tag in tags["scalars"]} == {"step", "gradients", "outputs", "updates"}
    assert len(tags["histograms"]) == 18 + 300


def test_without_tensorboard_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tensorboard_events, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'castwise\[tensorboard\]'"):
        TensorBoard(tmp_path)


def test_a_rank_that_records_alone_writes_beside_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given: list[Any] = [tmp_path / "run", tmp_path / "other.jsonl.gz", JSONL("here/monitor.jsonl.gz"), [].append]
    for rank in (0, 1):
        sinks = Sinks(given if rank == 0 else [*given[:2], JSONL("here")])
        sinks.set_apart(rank)
        sinks(EndRecord(rank))
        sinks.close()
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl.gz"))
    assert files == [
        *("here-rank1/monitor.jsonl.gz", "here/monitor.jsonl.gz", "other-rank1.jsonl.gz", "other.jsonl.gz"),
        *("run-rank1/monitor.jsonl.gz", "run/monitor.jsonl.gz"),
    ]
    assert all(len(records_in(path)) == 1 for path in tmp_path.rglob("*.jsonl.gz"))
