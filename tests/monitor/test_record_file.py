"""A file of records has one writer, and is as complete as the disk allows."""

from __future__ import annotations

import errno
import gzip
import os
import resource
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.monitor import recorded
from tests.monitor.crashing import kill_writers

from castwise import _files
from castwise.monitor import JSONL, Run, Sinks
from castwise.monitor import _record_file as record_file
from castwise.monitor._gzip_members import HEADER, gzip_member
from castwise.monitor._records import Record, record_from
from castwise.report._summary import Summary

HEAD = {"kind": "run", "format": 2, "settings": {"every": 1}}


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "skipped": False, **fields}


def record(fields: dict[str, Any]) -> Record:
    read = record_from(fields)
    assert read is not None
    return read


def steps_in(path: Path) -> list[int]:
    return [record.step for record in Run.read(path).steps]


@pytest.mark.parametrize("writers", [1, 2])
def test_no_acknowledged_step_is_lost_when_writers_are_killed(writers: int, tmp_path: Path) -> None:
    outcome = kill_writers(tmp_path, 6, writers, seed=writers)
    assert outcome.acknowledged > 6
    assert (outcome.lost, outcome.unreadable, outcome.mixed) == (0, 0, 0)


def test_a_second_writer_gets_a_folder_beside_and_says_so_once(tmp_path: Path) -> None:
    first = JSONL(tmp_path / "run")
    first(HEAD)
    first(step(1))
    for number in (2, 3):
        second = JSONL(tmp_path / "run")
        with pytest.warns(RuntimeWarning, match=rf"run/monitor.jsonl.gz: this one writes .*/run-{number}/"):
            second(HEAD)
        second(step(10 * number))
        assert second.path == tmp_path / f"run-{number}" / "monitor.jsonl.gz"
    first(step(2))
    first.close()
    assert [steps_in(tmp_path / name) for name in ("run", "run-2", "run-3")] == [[1, 2], [20], [30]]
    with JSONL(tmp_path / "run") as later:  # the first is closed
        later(HEAD)
    assert later.path == tmp_path / "run" / "monitor.jsonl.gz"


def test_a_second_writer_of_a_named_file_gets_a_file_beside_it(tmp_path: Path) -> None:
    first, second = JSONL(tmp_path / "a.jsonl.gz"), JSONL(tmp_path / "a.jsonl.gz")
    first(HEAD)
    with pytest.warns(RuntimeWarning):
        second(HEAD)
    assert second.path == tmp_path / "a-2.jsonl.gz"


def test_thinning_keeps_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "SAMPLES_BYTES", 1000)
    first, second = JSONL(tmp_path / "run"), JSONL(tmp_path / "run")
    first(HEAD)
    for number in range(1, 30):
        first({"kind": "sample", "step": number, "scale": 1.0})
    with pytest.warns(RuntimeWarning, match="another monitor is writing"):
        second(HEAD)
    first(step(30))
    assert steps_in(tmp_path / "run") == [30]


@contextmanager
def warned() -> Iterator[list[str]]:

    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(each.message) for each in caught]


def in_child(work: Callable[[], object]) -> None:
    if not (child := os.fork()):
        warnings.simplefilter("ignore")
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_that_trains_has_a_record_of_its_own(tmp_path: Path) -> None:
    sink = JSONL(tmp_path / "run")
    sink(HEAD)
    sink(step(1))

    def train() -> None:
        sink({"kind": "mistake"})
        for number in (2, 3):
            sink(step(number))
        sink({"kind": "end", "step": 3})
        sink.close()

    in_child(train)
    sink(step(4))
    assert steps_in(tmp_path / "run") == [1, 4]
    (other,) = (path for path in tmp_path.iterdir() if path.name.startswith("run-process"))
    assert steps_in(other) == [2, 3]
    assert Run.read(other).settings == HEAD["settings"]


def test_a_forked_child_that_does_not_train_writes_nothing(tmp_path: Path) -> None:
    sink = JSONL(tmp_path / "run")
    sink(HEAD)

    def end() -> None:
        sink({"kind": "end", "step": 1})
        sink.close()

    in_child(end)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not Run.read(tmp_path / "run").ended


def test_a_child_does_not_hold_the_lock_of_a_parent_that_has_closed_its_file(tmp_path: Path) -> None:
    sink = JSONL(tmp_path / "run")
    sink(HEAD)
    go_on, wait = os.pipe()
    if not (child := os.fork()):
        os.read(go_on, 1)
        os._exit(0)
    try:
        sink.close()
        with JSONL(tmp_path / "run") as second:
            second(HEAD)
    finally:
        os.write(wait, b"x")
        os.waitpid(child, 0)
    assert second.path == tmp_path / "run" / "monitor.jsonl.gz"


def test_samples_of_a_child_can_be_read(tmp_path: Path) -> None:
    def sample(number: int) -> dict[str, Any]:
        full = recorded.sample(number, 1.0, {"a": -16.0}, {"a": 1.0})
        return {**full, "owned": {"a": ["a.weight"]}}

    sink = JSONL(tmp_path / "run")
    sink(HEAD)
    sink(sample(1))

    def train() -> None:
        sink(step(2))
        sink(sample(2))

    in_child(train)
    (other,) = (path for path in tmp_path.iterdir() if path.name.startswith("run-process"))
    assert [sample.gradients.keys() for sample in Run.read(other).samples] == [{"a.weight"}]


def deleted(run: Path) -> None:
    (run / "monitor.jsonl.gz").unlink()
    run.rmdir()


def renamed(run: Path) -> None:
    run.rename(run.with_name("old"))


def rotated(run: Path) -> None:
    (run / "monitor.jsonl.gz").rename(run / "monitor.jsonl.gz.1")
    (run / "monitor.jsonl.gz").touch()


@pytest.mark.parametrize("lose", [deleted, renamed, rotated])
def test_a_file_that_disappears_is_begun_again_with_one_warning(
    lose: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "CHECK_SECONDS", 0.0)
    sink, run = JSONL(tmp_path / "run"), tmp_path / "run"
    sink(HEAD)
    sink(step(1))
    lose(run)
    with warned() as messages:
        sink(step(2))
        lose(run) if lose is deleted else None
        sink(step(3))
    assert messages == [f"{run}/monitor.jsonl.gz was deleted or renamed: the records continue in a new file there"]
    again = Run.read(run)
    assert again.settings == HEAD["settings"]
    assert [record.step for record in again.steps] == ([3] if lose is deleted else [2, 3])


def test_a_script_that_changes_folders_continues_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "CHECK_SECONDS", 0.0)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    sink = JSONL("run")
    sink(HEAD)
    monkeypatch.chdir(tmp_path / "other")
    sink(step(1))
    sink.close()
    sink(step(2))
    assert steps_in(tmp_path / "run") == [1, 2]
    assert list((tmp_path / "other").iterdir()) == []


def test_another_file_that_appears_instead_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "CHECK_SECONDS", 0.0)
    sinks, file = Sinks([tmp_path / "run"]), tmp_path / "run" / "monitor.jsonl.gz"
    sinks(record(HEAD))
    file.rename(tmp_path / "old")
    file.write_text("mine\nand mi")
    with warned() as messages:
        sinks(record(step(1)))
    assert "it is not a record that castwise has written" in messages[-1]
    assert file.read_text() == "mine\nand mi"


def test_the_file_is_looked_for_once_a_second_and_not_at_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    now = 100.0
    monkeypatch.setattr(record_file.time, "monotonic", lambda: now)
    sink = JSONL(tmp_path)
    sink(HEAD)
    for name in ("stat", "fstat", "write", "open", "lseek"):
        true = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, n=name, f=true, **more: (calls.update([n]), f(*given, **more))[1])
    for number in range(100):
        now = 100.0 + number / 50  # two seconds
        sink(step(number))
    monkeypatch.undo()
    assert calls == {"write": 100, "stat": 1}


FOREIGN = [
    b"a,b\n1,2",
    b"PK\x03\x04",
    b'{"kind": "step", "step": 1}\n',
    gzip.compress(b"{}\n", mtime=0),
    b"\0" * 5000,
    b"{\n{",
]


@pytest.mark.parametrize("content", FOREIGN)
def test_an_existing_file_of_something_else_is_refused_and_left_as_it_is(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "monitor.jsonl.gz").write_bytes(content)
    (tmp_path / "log.jsonl.gz").write_bytes(content)
    for path in (tmp_path, tmp_path / "log.jsonl.gz"):
        with pytest.raises(FileExistsError, match=r"it exists and is not a record that castwise has written.*\.jsonl"):
            Sinks([path])
    late = JSONL(tmp_path / "later")
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "monitor.jsonl.gz").write_bytes(content)
    with pytest.raises(FileExistsError, match="is not a record"):
        late(HEAD)
    assert {path.read_bytes() for path in tmp_path.rglob("*.jsonl.gz")} == {content}


@pytest.mark.parametrize(
    "content", [b"", HEADER[:1], HEADER, b"\0" * 100, gzip_member(b'{"kind": "run", "format": 1')[:-9]]
)
def test_what_a_crash_has_left_of_a_record_is_continued(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "monitor.jsonl.gz").write_bytes(content)
    with JSONL(tmp_path) as sink:
        sink(HEAD)
    assert Run.read(tmp_path).settings == HEAD["settings"]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """A disk that is full while the set holds anything: writes take a part of a line, and then none."""
    state: set[str] = set()
    write = os.write

    def os_write(file: int, data: Any) -> int:
        if not state:
            return write(file, data)
        if "part" in state:
            state.discard("part")
            return write(file, data[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", os_write)
    yield state
    state.clear()


def test_a_disk_that_is_full_for_50_of_200_steps_loses_nothing(tmp_path: Path, full: set[str]) -> None:
    with warned() as messages:
        sinks = Sinks([tmp_path])
        sinks(record(HEAD))
        for number in range(1, 201):
            if number == 80:
                full |= {"full", "part"}
            if number == 130:
                full.clear()
            sinks(record(step(number)))
        sinks.close()
    (message,) = messages
    assert message.startswith(
        f"{tmp_path}/monitor.jsonl.gz cannot be written: No space left on device. Records are kept"
    )
    run = Run.read(tmp_path)
    assert [record.step for record in run.steps] == list(range(1, 201))
    assert run.lost == 0


def test_what_does_not_fit_into_memory_is_counted_in_the_record(
    tmp_path: Path, full: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "BACKLOG_BYTES", 1000)
    with warned() as messages:
        sinks = Sinks([tmp_path])
        full.add("full")
        sinks(record(HEAD))
        for number in range(1, 201):
            sinks(record(step(number)))
        full.clear()
        sinks(record(step(201)))
    assert len(messages) == 1
    run = Run.read(tmp_path)
    numbers = [record.step for record in run.steps]
    assert numbers == list(range(numbers[0], 202))
    assert run.lost == 201 - len(numbers) > 150
    assert f"{run.lost} records lost, because the disk was full" in Summary.of([run]).lines()[0]
    assert (tmp_path / "monitor.jsonl.gz").stat().st_size < 2000


def test_names_are_not_lost_so_samples_can_be_read(
    tmp_path: Path, full: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "BACKLOG_BYTES", 3000)
    sink = JSONL(tmp_path)
    with warned() as messages:
        full.add("full")
        sink(HEAD)
        for number in range(1, 20):
            modules = [f"m{place}" for place in range(1 + number // 5)]
            values = dict.fromkeys(modules, -16.0)
            owned = {name: [f"{name}.weight"] for name in modules}
            sink({**recorded.sample(number, 1.0, values, values), "owned": owned})
        full.clear()
        sink(step(20))
    assert len(messages) == 1
    run = Run.read(tmp_path)
    assert run.samples[-1].gradients.keys() == {f"m{place}.weight" for place in range(4)}
    assert run.lost == 19 - len(run.samples) > 0


def test_the_limit_of_a_files_size_is_a_full_disk(tmp_path: Path) -> None:
    sink = JSONL(tmp_path)
    sink(HEAD)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
        with warned() as messages:
            for number in range(20):
                sink(step(number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert "File too large" in messages[0]
    assert len(Run.read(tmp_path).steps) < 20
    sink.close()
    assert steps_in(tmp_path) == list(range(20))


def test_a_record_ends_with_a_warning_if_the_disk_stays_full(tmp_path: Path, full: set[str]) -> None:
    sink = JSONL(tmp_path)
    sink(HEAD)
    full.add("full")
    with warned() as messages:
        sink(step(1))
        sink.close()
    assert messages[-1] == f"1 record of {tmp_path}/monitor.jsonl.gz could not be written"
    assert steps_in(tmp_path) == []


def test_warnings_that_are_errors_do_not_end_a_record(tmp_path: Path, full: set[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sinks = Sinks([tmp_path])
        full.add("full")
        sinks(record(HEAD))
        full.clear()
        sinks(record(step(1)))
    assert steps_in(tmp_path) == [1]


def test_without_locks_records_are_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "try_lock", lambda file: None)
    monkeypatch.setattr(_files, "try_lock", lambda file: None)
    with JSONL(tmp_path) as sink:
        sink(HEAD)
        sink(step(1))
    _files.replace(tmp_path / "x", b"y", "a file", lambda head: True)
    assert steps_in(tmp_path) == [1]
    assert recorded.records_in(tmp_path)[0] == HEAD
