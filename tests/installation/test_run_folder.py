"""Each run has a folder of its own; ranks of a launch find the same one, and none waits for another."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from tests.forked import Python

from castwise._installation import run_folder
from castwise._installation.run_folder import RunFolder, launch_now, model_folder
from castwise.monitor import Run
from castwise.monitor._run_files import read_runs, run_in

VARIABLES = re.compile(r"RANK|WORLD_SIZE|LOCAL_.*|MASTER_.*|TORCHELASTIC_.*|SLURM_.*")


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if VARIABLES.fullmatch(name):
            monkeypatch.delenv(name)


class Ranks:
    """The processes of launches, in this one: each `make` is that of a new process with these variables."""

    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self.patch = out, monkeypatch

    def make(self, parent: str = "shell", host: str = "node0", installs: int = 1, **variables: object) -> Path:
        with self.patch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, str(value))
            patch.setattr(run_folder, "_INSTALLED", {self.out: installs - 1})
            patch.setattr(run_folder, "_parent", lambda: f"{host} {parent}")
            patch.setattr("platform.node", lambda: host)
            return RunFolder(self.out).make()


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(tmp_path / "runs", monkeypatch)


def torchrun(rank: int, size: int = 2, local: int = 2, run_id: str = "none", **more: object) -> dict[str, object]:
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": "node0",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        **more,
    }


def test_runs_of_one_process_each_have_a_folder_and_touch_no_other_file(ranks: Ranks) -> None:
    out = ranks.out
    other = {out / "Net" / "monitor.jsonl.gz": "another's", out / "mine" / "latest": "x", out / "notes": "y"}
    for file, text in other.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    folders = [ranks.make() for _ in range(20)]
    assert len(set(folders)) == 20
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", folder.name) for folder in folders)
    assert (out / "latest").read_text() == f"{folders[-1].name}\n"
    assert run_in(out) == folders[-1]
    assert {file: file.read_text() for file in other} == other


def test_a_run_is_named_after_its_start_in_utc(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC-9")  # nine hours before UTC
        time.tzset()
        before, made, after = time.gmtime(), ranks.make(), time.gmtime()
    time.tzset()
    first, last = (time.strftime("%Y%m%d-%H%M%S", when) for when in (before, after))
    assert first <= made.name[:15] <= last


def test_nothing_is_created_before_the_first_record(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs")
    assert folder.run is None
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_file_called_latest_that_is_not_ours_stays(kind: str, ranks: Ranks) -> None:
    ranks.out.mkdir()
    latest = ranks.out / "latest"
    if kind == "file":
        latest.write_text("checkpoint-300\n")
    elif kind == "folder":
        latest.mkdir()
    else:
        (ranks.out / "target").write_text("20250101-000000-0000\n")
        latest.symlink_to("target")
    run = ranks.make()
    assert run_in(ranks.out) == run
    assert latest.is_dir() or latest.read_text() in ("checkpoint-300\n", "20250101-000000-0000\n")


def test_ranks_of_one_node_share_a_folder_and_launches_do_not(ranks: Ranks) -> None:
    launches = []
    for agent in ("agent 1", "agent 2", "agent 3"):
        made = {ranks.make(agent, **torchrun(rank)) for rank in (1, 0)}
        assert len(made) == 1
        launches += made
    assert len(set(launches)) == 3


def test_ranks_without_torchrun_share_a_folder_and_the_next_launch_of_the_same_shell_has_another(ranks: Ranks) -> None:
    plain = {"WORLD_SIZE": 3, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    launches = [{ranks.make(RANK=rank, **plain) for rank in range(3)} for _ in range(3)]
    assert [len(made) for made in launches] == [1, 1, 1]
    assert len(set.union(*launches)) == 3


def test_nodes_without_torchrun_share_a_folder_by_address_and_port(ranks: Ranks) -> None:
    def launch(port: int) -> set[Path]:
        plain = {"WORLD_SIZE": 4, "MASTER_ADDR": "node0", "MASTER_PORT": port}
        return {ranks.make(f"shell {rank}", f"node{rank // 2}", RANK=rank, **plain) for rank in range(4)}

    first, second = launch(29500), launch(29501)
    assert (len(first), len(second)) == (1, 1)
    assert first != second


def test_nodes_share_a_folder_by_the_run_id_and_a_second_launch_with_the_same_has_another(ranks: Ranks) -> None:
    def launch(agents: list[str], order: list[int]) -> set[Path]:
        of_rank = {rank: (agents[rank // 2], f"node{rank // 2}") for rank in range(4)}
        return {ranks.make(*of_rank[rank], **torchrun(rank, 4, run_id="job")) for rank in order}

    first, second = launch(["a", "b"], [0, 1, 2, 3]), launch(["c", "d"], [3, 0, 2, 1])
    assert (len(first), len(second)) == (1, 1)
    assert first != second


def test_a_launch_that_failed_on_one_rank_is_not_taken_for_the_next(ranks: Ranks) -> None:
    first = ranks.make("agent 1", **torchrun(0, run_id="job"))
    second = {ranks.make("agent 2", **torchrun(rank, run_id="job")) for rank in (1, 0)}
    assert len(second) == 1
    assert first not in second


def test_attempts_of_an_elastic_job_are_in_one_folder(ranks: Ranks) -> None:
    made = [
        {
            ranks.make("agent", **torchrun(rank, size, size, TORCHELASTIC_RESTART_COUNT=restarts, **limit))
            for rank in order
        }
        for limit in [{"TORCHELASTIC_MAX_RESTARTS": 3}]
        for restarts, size, order in [(0, 3, [0, 1, 2]), (1, 3, [2, 0, 1]), (1, 2, [0, 1]), (1, 3, [2, 1, 0])]
    ]
    (run,) = {folder.parent for folders in made for folder in folders}
    assert [sorted(folder.name for folder in folders) for folders in made] == [
        ["attempt-1"],
        ["attempt-2"],
        ["attempt-3"],  # a node has left, which torchrun does not count
        ["attempt-4"],  # and has come back
    ]
    assert run_in(ranks.out) == run


def test_a_launch_without_restarts_has_no_attempts(ranks: Ranks) -> None:
    assert ranks.make(**torchrun(0)).parent == ranks.out


def test_tasks_of_a_slurm_step_share_a_folder_and_steps_do_not(ranks: Ranks) -> None:
    def step(number: int, restart: int = 0) -> set[Path]:
        job = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": number, "SLURM_STEP_NUM_TASKS": 3, "SLURM_RESTART_COUNT": restart}
        return {ranks.make(f"shell {task}", f"node{task % 2}", SLURM_PROCID=task, **job) for task in range(3)}

    made = [step(0), step(1), step(1, restart=1), step(1)]
    assert [len(folders) for folders in made] == [1] * 4
    assert len(set.union(*made)) == 4


def test_a_batch_script_of_slurm_without_a_step_is_a_process_alone(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert launch_now() is None
    assert ranks.make() != ranks.make()


def test_the_second_run_in_the_same_ranks_has_a_folder_of_its_own(ranks: Ranks) -> None:
    made = [{ranks.make(installs=n, **torchrun(rank)) for rank in (0, 1)} for n in (1, 2)]
    assert [len(folders) for folders in made] == [1, 1]
    assert made[0] != made[1]


def test_where_the_system_shows_no_processes_the_parent_is_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with_time = run_folder._parent()
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    assert run_folder._parent() not in ("", with_time)
    assert run_folder._parent() == run_folder._parent()


def test_a_forked_child_writes_into_its_parents_run_in_either_order(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    if not (child := os.fork()):
        folder.make()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    by_child = folder.run
    assert by_child is not None
    assert folder.make() == by_child == run_in(tmp_path)


def test_folders_of_killed_processes_are_removed_once_they_are_old(ranks: Ranks) -> None:
    for name, age in ((".new-0123456789abcdef", 7200), (".new-0123456789abcde0", 0), (".new-mine", 7200)):
        (ranks.out / name).mkdir(parents=True)
        (ranks.out / name / "run-x").touch()
        os.utime(ranks.out / name, (time.time() - age,) * 2)
    ranks.make()
    assert {path.name for path in ranks.out.glob(".new-*")} == {".new-0123456789abcde0", ".new-mine"}


def test_an_entry_of_a_launch_is_removed_once_nothing_of_the_launch_has_changed_for_a_month(ranks: Ranks) -> None:
    month = 31 * 86400

    def age(folder: Path) -> None:
        for path in (*folder.rglob("*"), folder):
            os.utime(path, (time.time() - month,) * 2)

    def launched(agent: str) -> tuple[Path, Path]:
        known = set(launches.glob("*"))
        (run,) = {ranks.make(agent, **torchrun(rank)) for rank in (0, 1)}
        (run / "Net").mkdir()
        (run / "Net" / "monitor.jsonl.gz").touch()
        (entry,) = set(launches.glob("*")) - known
        age(run)
        age(entry)
        return run, entry

    launches = ranks.out / ".launches"
    _, over = launched("ended")
    trains, records = launched("still trains")
    (trains / "Net" / "monitor.jsonl.gz").write_text("")
    _, noted = launched("has a file of the user's")
    (noted / "notes").touch()
    os.utime(noted, (time.time() - month,) * 2)
    same_id = {"run_id": "job", "MASTER_ADDR": "node0"}
    twice = [ranks.make(agent, **torchrun(0, 4, **same_id)) for agent in ("a", "b")]  # numbered 1 and 2
    first, second = sorted(set(launches.glob("*")) - {over, records, noted})
    age(first)
    age(twice[0])
    restarted, waits = launched("waits for nodes")
    run = ranks.make("waits for nodes", **torchrun(0, TORCHELASTIC_RESTART_COUNT=1))
    assert run == restarted / "attempt-2"
    assert not over.exists()
    assert all(entry.is_dir() for entry in (records, noted, first, second, waits))
    assert ranks.make("still trains", **torchrun(1, TORCHELASTIC_RESTART_COUNT=1)).parent == trains
    age(second)
    age(twice[1])
    ranks.make()
    assert not first.exists()
    assert not second.exists()
    assert not list(ranks.out.glob(".new-*"))


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Net", "Net"),
        ("../../x", "______x"),
        ("Gen[a/b]", "Gen_a_b_"),
        ("Net-rank1", "Net_rank1"),
        ("n" * 300, "n" * 100),
        ("网" * 100, "网" * 33),
        ("", "model"),
        (".", "_"),
        ("CON", "CON_"),
        ("lpt1", "lpt1_"),
        ("report.html", "report_html"),
        ("\ud800", "_"),
        ("A+B", "A+B"),
    ],
)
def test_a_folders_name_is_made_from_that_of_a_class(name: str, folder: str) -> None:
    assert model_folder(name, []) == folder


def test_folders_of_models_differ_even_where_cases_do_not_count() -> None:
    taken: list[str] = []
    for name in ("Net", "net", "Net", "N/t", "N.t"):
        taken.append(model_folder(name, taken))
    assert taken == ["Net", "net-2", "Net-3", "N_t", "N_t-2"]


TRAINING = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
print("done")
"""


def launch(count: int, folder: Path, **variables: Any) -> list[Python]:
    given = ["-m", "castwise", "run", "train.py"]
    return [Python(given, folder, RANK=rank, WORLD_SIZE=count, COLUMNS=2000, **variables) for rank in range(count)]


def test_eight_ranks_that_start_together_all_run_and_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    earlier = [tmp_path / "castwise-run" / f"Net-process{number}" / "monitor.jsonl.gz" for number in range(200)]
    for file in earlier:  # castwise 0.2 removed these, on all ranks at once
        file.parent.mkdir(parents=True)
        file.touch()
    for number, count in ((1, 2), (2, 8)):
        ranks = launch(count, tmp_path, MASTER_PORT=number)
        outputs = [rank.communicate() for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * count, outputs
        assert [output for output, _ in outputs] == ["done\n"] * count
        assert len([path for path in (tmp_path / "castwise-run").glob("2*-*-*") if path.is_dir()]) == number
        assert all(file.is_file() for file in earlier)
    run = run_in(tmp_path / "castwise-run")
    assert {file.parent.name for file in run.glob("*/monitor.jsonl.gz")} == {
        "Linear",
        *(f"Linear-rank{rank}" for rank in range(1, 8)),
    }
    assert len(Run.read(run / "Linear-rank7").steps) == 3


BLOCKED = {
    "a file in the way": lambda folder: (folder / "castwise-run").write_text("mine"),
    "a link to nowhere": lambda folder: (folder / "castwise-run").symlink_to("/proc/none/x"),
    "a folder that takes no files": lambda folder: (folder / "castwise-run").symlink_to("/proc/self"),
}


@pytest.mark.parametrize("why", BLOCKED)
def test_a_folder_that_cannot_be_written_is_reported_once_and_the_script_runs(why: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING + "raise SystemExit(7)\n")
    BLOCKED[why](tmp_path)
    before = os.readlink(path) if (path := tmp_path / "castwise-run").is_symlink() else path.read_text()
    process = Python(["-m", "castwise", "run", "train.py"], tmp_path, COLUMNS=2000)
    output, errors = process.communicate()
    assert (process.returncode, output) == (7, "done\n")
    (line,) = errors.splitlines()
    assert line.startswith(f"castwise: nothing is recorded, because {path} cannot be written: ")
    assert before == (os.readlink(path) if path.is_symlink() else path.read_text())


def test_a_failure_of_the_preparation_leaves_the_script_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "failing.py").write_text(
        "import castwise._installation as installation, runpy\n"
        "def fail(*_):\n    raise RuntimeError('of castwise')\n"
        "installation.begin = fail\n"
        "runpy.run_module('castwise', run_name='__main__', alter_sys=True)\n"
    )
    process = Python(["failing.py", "run", "train.py"], tmp_path)
    output, errors = process.communicate()
    assert (process.returncode, output) == (0, "done\n")
    assert errors.splitlines()[0] == "castwise: castwise could not be installed: RuntimeError: of castwise"
    assert "Traceback" not in errors


def test_ranks_with_nothing_in_common_are_joined_when_they_are_read(ranks: Ranks) -> None:
    from tests.monitor import recorded

    for rank in (0, 1, 2):
        name = f"Net-rank{rank}" if rank else "Net"
        steps = [recorded.step(number, 2.0, "overflow" if number == rank else None) for number in (1, 2, 3)]
        recorded.write(ranks.make(RANK=rank) / name, *([] if rank else steps), ranks=3)
    (run,) = read_runs([ranks.out])
    assert run.path.parent.name == "Net"
    assert len(run.steps) == 3
