"""Records are found where they are, and the attempts of a job are one history."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.monitor import recorded
from tests.monitor.recorded import Record, sample, step, write

import castwise
from castwise.monitor import Run
from castwise.monitor._run_files import read_runs, records_in, run_in

FIRST, SECOND = "20261123-133208-1f3a", "20261123-140000-00ab"


def run_folder(out: Path, name: str, latest: bool = True) -> Path:
    """The folder of a run, as `castwise run` creates it."""
    (out / name).mkdir(parents=True)
    (out / name / ".run-0123456789abcdef").touch()
    if latest:
        (out / "latest").write_text(f"{name}\n")
    return out / name


def steps(first: int, last: int, loss: float = 1.0) -> list[Record]:
    return [step(number, 2.0, loss=loss) for number in range(first, last + 1)]


def invariant(number: int) -> Record:
    return {"kind": "invariant", "step": number, "name": "never-updated", "text": "", "remedy": ""}


def losses(run: Run) -> list[tuple[int, float]]:
    return [(record.step, record.loss) for record in run.steps]


def test_the_latest_run_is_the_one_that_the_file_names_or_the_last_by_name(tmp_path: Path) -> None:
    second, first = run_folder(tmp_path, SECOND), run_folder(tmp_path, FIRST)
    (tmp_path / "20271123-140000-00ab").mkdir()  # not a run's
    assert run_in(tmp_path) == first
    for content in ("", "nonsense", f"../{FIRST}", "20991123-140000-00ab\n", "\udcff" * 9):
        (tmp_path / "latest").write_bytes(content.encode(errors="surrogateescape"))
        assert run_in(tmp_path) == second
    (tmp_path / "latest").unlink()
    assert run_in(tmp_path) == second
    assert run_in(first) == first


def test_a_run_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, closed = run_folder(tmp_path, FIRST), run_folder(tmp_path, SECOND)
    write(run / "Net", *steps(1, 2))
    listdir = os.listdir

    def refusing(folder: Path) -> list[str]:
        if folder == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", refusing)
    assert run_in(tmp_path) == run
    assert records_in(tmp_path) == [run / "Net" / "monitor.jsonl.gz"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_with_the_name_of_the_latest_run_is_not_waited_for(tmp_path: Path) -> None:
    run = run_folder(tmp_path, FIRST, latest=False)
    os.mkfifo(tmp_path / "latest")
    assert run_in(tmp_path) == run


def test_records_of_castwise_0_2_are_found(tmp_path: Path) -> None:
    for name in ("Net", "Net-rank1", "Gen[a"):
        write(tmp_path / name, *steps(1, 2), ranks=2)
    assert [file.parent.name for file in records_in(tmp_path)] == ["Gen[a", "Net", "Net-rank1"]
    assert [run.path.parent.name for run in read_runs([tmp_path])] == ["Gen[a", "Net"]


def test_attempts_that_resumed_are_one_history_with_the_later_steps(tmp_path: Path) -> None:
    run = run_folder(tmp_path, FIRST)
    write(run / "attempt-1" / "Net", *steps(1, 6), sample(6, 2.0, {"a": -9.0}, {}), ranks=2)
    write(run / "attempt-1" / "Net-rank1", *steps(1, 6), ranks=2)
    write(run / "attempt-2" / "Net", *steps(5, 8, 2.0), sample(8, 2.0, {"a": -9.0}, {}))
    write(run / "attempt-10" / "Net", *steps(9, 9, 3.0))
    (joined,) = read_runs([tmp_path])
    assert losses(joined) == [*((n, 1.0) for n in (1, 2, 3, 4)), *((n, 2.0) for n in (5, 6, 7, 8)), (9, 3.0)]
    assert [record.step for record in joined.samples] == [8]
    assert joined.settings["attempts"] == 3


def test_an_attempt_that_counts_from_one_again_is_counted_on(tmp_path: Path) -> None:
    run = run_folder(tmp_path, FIRST)
    write(run / "attempt-1" / "Net", *steps(1, 3), invariant(2))
    write(run / "attempt-2" / "Net", *steps(1, 2, 2.0), invariant(1))
    (joined,) = read_runs([run])
    assert [record.step for record in joined.invariants] == [2, 4]
    assert losses(joined) == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]


def test_models_that_are_not_of_an_elastic_job_stay_apart(tmp_path: Path) -> None:
    first, second = run_folder(tmp_path, FIRST), run_folder(tmp_path, SECOND)
    for run in (first, second):
        write(run / "Net", *steps(1, 3))
        write(run / "Critic", *steps(1, 3))
    assert len(read_runs([first])) == 2
    assert len(read_runs([first / "Net", second / "Net"])) == 2


def test_ranks_in_folders_of_their_own_are_joined_with_the_nearest_and_complete_runs_are_not(tmp_path: Path) -> None:
    for name, ranks in ((FIRST, ["Net", "Net-rank1"]), ("20261123-140000-0001", ["Net"]), (SECOND, ["Net-rank1"])):
        run = run_folder(tmp_path, name)
        for rank in ranks:
            write(run / rank, *steps(1, 3), ranks=2)
    (joined,) = read_runs([tmp_path])
    assert joined.path.parent.parent.name == "20261123-140000-0001"
    assert len(read_runs([tmp_path / FIRST, tmp_path / SECOND])) == 2


@pytest.mark.parametrize(("second", "is_joined"), [("20261123-141000-00ab", True), ("20261123-141001-00ab", False)])
def test_ranks_that_began_more_than_ten_minutes_apart_are_not_joined(
    second: str, is_joined: bool, tmp_path: Path
) -> None:
    for name, rank in ((second, "Net-rank1"), ("20261123-140000-0001", "Net")):
        write(run_folder(tmp_path, name) / rank, *steps(1, 3), ranks=2)
    assert [file.parent.name for file in records_in(tmp_path)] == ["Net", "Net-rank1"][: 1 + is_joined]


def test_a_verdict_of_a_folder_of_runs_is_that_of_the_latest(tmp_path: Path) -> None:
    recorded.healthy(run_folder(tmp_path, FIRST) / "Net", steps=200, layers=1)
    assert castwise.verdict(tmp_path) == castwise.verdict(tmp_path / FIRST / "Net")
    write(tmp_path / FIRST / "Critic")
    with pytest.raises(ValueError, match=r"has several records: give one of .*Critic, .*Net"):
        castwise.verdict(tmp_path)


def test_a_folder_without_records_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="monitor"):
        castwise.verdict(tmp_path)
