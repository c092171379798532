"""Records survive what happens to the process that writes them."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from castwise.monitor.packing import in_full
from tests.monitor import recorded

from castwise.monitor import JSONL, Sinks, TensorBoard
from castwise.monitor import _tensorboard_events as tensorboard_events

WRITE_FOR_EVER = """
import itertools, sys
from castwise.monitor.packing import in_full
from castwise.monitor._sinks import JSONL
sink = JSONL(sys.argv[1])
for step in itertools.count(1):
    sink({"kind": "step", "step": step, "numbers": [step] * 2000})
"""


def lines(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [in_full(record) if record["kind"] == "step" else record for record in records]


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
    return {"kind": "step", "step": number, **plain, "seconds": 0.1, **fields}


def test_a_path_is_a_file_or_the_folder_of_one(tmp_path: Path) -> None:
    for path, written in (("run.jsonl", "run.jsonl"), ("runs/one", "runs/one/monitor.jsonl")):
        with JSONL(tmp_path / path) as sink:
            sink({"kind": "end", "step": 1})
        assert lines(tmp_path / written) == [{"kind": "end", "step": 1}]


def test_nothing_is_made_before_the_first_record(tmp_path: Path) -> None:
    JSONL(tmp_path / "run").close()
    assert list(tmp_path.iterdir()) == []


def test_the_file_can_be_read_while_it_grows(tmp_path: Path) -> None:
    with JSONL(tmp_path) as sink:
        for number in range(3):
            sink(step(number))
            assert lines(sink.path)[-1]["step"] == number


def test_what_is_no_number_in_json_is_a_string(tmp_path: Path) -> None:
    with JSONL(tmp_path) as sink:
        sink({"kind": "x", "a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf, "e": (1, 2)}})
    assert lines(sink.path) == [{"kind": "x", "a": "nan", "b": ["inf", 1.5], "c": {"d": "-inf", "e": [1, 2]}}]


def test_a_killed_process_loses_at_most_the_line_it_was_writing(tmp_path: Path) -> None:
    path = tmp_path / "monitor.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(path)])
    while not path.exists() or path.stat().st_size < 2_000_000:
        assert writer.poll() is None
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL
    *whole, _broken = path.read_bytes().split(b"\n")
    assert [json.loads(line)["step"] for line in whole] == list(range(1, len(whole) + 1))
    with JSONL(path) as sink:
        sink({"kind": "end", "step": 0})
    assert path.read_bytes().split(b"\n")[:-1] == [*whole, b'{"kind":"end","step":0}']


@pytest.mark.parametrize("rest", [b'{"kind": "st', b'{"kind": "step", "numbers": [' + b"1, " * 100_000])
@pytest.mark.parametrize("whole", [b"", b'{"kind": "run"}\n'])
def test_a_broken_last_line_is_cut_off(whole: bytes, rest: bytes, tmp_path: Path) -> None:
    path = tmp_path / "monitor.jsonl"
    path.write_bytes(whole + rest)
    with JSONL(path) as sink:
        sink({"kind": "end"})
    assert path.read_bytes() == whole + b'{"kind":"end"}\n'


def test_a_sink_that_fails_is_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    def fail(record: dict[str, Any]) -> None:
        raise OSError("no space left")

    seen: list[dict[str, Any]] = []
    sinks = Sinks([fail, tmp_path, seen.append])
    with pytest.warns(RuntimeWarning, match=r"sink <function .*fail.* failed and was removed: OSError: no sp"):
        sinks(step(1))
    sinks(step(2))  # a second warning would be an error
    sinks.close()
    assert seen == lines(tmp_path / "monitor.jsonl") == [step(1), step(2)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_file_and_not_the_training(tmp_path: Path) -> None:
    (tmp_path / "monitor.jsonl").symlink_to("/dev/full")
    sinks = Sinks([tmp_path])
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        sinks(step(1))


def test_what_is_no_sink_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a sink must be a path or a function of one record \(a dict\), got 3"):
        Sinks([3])  # type: ignore[list-item]


def test_tensorboard_finds_what_was_recorded(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def statistics(flush: float) -> dict[str, Any]:
        fit = {"flush": flush, "subnormal": 0.5, "headroom_bits": 3.0}
        formats = dict.fromkeys(("fp16", "bf16", "e4m3", "e5m2"), fit)
        return {"exponents": {"lowest": -3, "counts": [1, 0, 4]}, "formats": formats}

    sink = TensorBoard(tmp_path)
    sink({"kind": "run", "settings": {"model": "GPT"}})
    sink(step(1))
    sink(step(2, loss=0.25, skipped=True, cause="overflow", parameters=["a.weight"]))
    weights = {"a.weight": {"update_to_weight": 1e-3, "lost_in_bf16": 0.125}}
    modules, outputs = {"a": statistics(0.25), "b": statistics(0.125)}, {"": statistics(0.5)}
    kinds = {"modules": modules, "activations": outputs, "weights": weights}
    sink({"kind": "sample", "step": 2, "grad_norm": 1.5, **kinds})
    sink({"kind": "diagnosis", "step": 2, "text": "a made an inf", "advice": "lower scale"})
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
    sink(recorded.step(1, 1024.0))
    sink(recorded.sample(1, 1024.0, dict.fromkeys(names, -20.0), dict.fromkeys(names, 1.0)))
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
    given: list[Any] = [tmp_path / "run", tmp_path / "other.jsonl", JSONL("here/monitor.jsonl"), [].append]
    for rank in (0, 1):
        sinks = Sinks(given if rank == 0 else [*given[:2], JSONL("here")])
        sinks.set_apart(rank)
        sinks({"kind": "end", "step": rank})
        sinks.close()
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl"))
    assert files == [
        *("here-rank1/monitor.jsonl", "here/monitor.jsonl", "other-rank1.jsonl", "other.jsonl"),
        *("run-rank1/monitor.jsonl", "run/monitor.jsonl"),
    ]
    assert all(len(path.read_text().splitlines()) == 1 for path in tmp_path.rglob("*.jsonl"))
