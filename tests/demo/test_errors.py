from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from castwise.cli import app
from castwise.demo import checkpoint, command, corpus
from castwise.demo.checkpoint import Checkpoint
from castwise.demo.run_folder import MetricsFile

if TYPE_CHECKING:
    from tests.demo.conftest import Demo

Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs the command in this process; returns the one line on stderr."""

    def run(*arguments: object) -> str:
        with pytest.raises(SystemExit) as exit_:
            app(["demo", *map(str, arguments)])
        stderr = capsys.readouterr().err
        assert exit_.value.code == 2
        assert stderr.startswith("castwise demo: ")
        assert stderr.count("\n") == 1
        return stderr.removeprefix("castwise demo: ").removesuffix("\n")

    return run


def test_a_missing_path(refusal: Refusal, tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert refusal("--data", path) == f"--data {path} does not exist: use a text file, or a folder of text files"


def test_a_folder_without_text(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(1000))
    (tmp_path / "empty").touch()
    message = f"--data {tmp_path} contains no readable text: use a text file, or a folder of text files"
    assert refusal("--data", tmp_path) == message


def test_less_text_than_two_contexts(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 257)
    message = "needs at least 258 bytes of text (a context of 128 to train on, another to validate), got 257"
    assert refusal("--data", tmp_path) == f"{message}: use --data with more text"


def test_an_unwritable_folder(refusal: Refusal, demo: Demo) -> None:
    out = demo.text / "runs"  # below a regular file, where not even root can write
    assert refusal("--data", demo.text, "--out", out) == f"cannot write {out}: Not a directory"


def test_an_unknown_preset(refusal: Refusal) -> None:
    assert refusal("--preset", "huge") == "--preset must be one of tiny, small, got 'huge'"


@pytest.mark.parametrize("option", ["--steps", "--checkpoint-every"])
def test_a_count_below_one(refusal: Refusal, demo: Demo, option: str) -> None:
    assert refusal("--data", demo.text, option, 0) == f"{option} must be at least 1, got 0"
    assert not demo.out.exists()


@pytest.mark.parametrize("device", ["foo", "meta"])
def test_a_device_the_demo_does_not_know(refusal: Refusal, device: str) -> None:
    assert refusal("--device", device) == f"--device must be cpu, cuda or cuda:<number>, got {device!r}"


def test_a_gpu_that_is_not_there(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert (
        refusal("--device", "cuda:1")
        == "--device cuda:1: torch finds 1 CUDA device; use --device cpu, or a number below 1"
    )


def test_resuming_a_folder_that_is_no_run(refusal: Refusal, tmp_path: Path) -> None:
    message = (
        f"{tmp_path} is not the folder of a run, because it has no readable settings.json: give --resume a folder that "
        "castwise demo has created"
    )
    assert refusal("--resume", tmp_path) == message
    (tmp_path / "settings.json").write_text("[" * 100_000)
    assert refusal("--resume", tmp_path) == message


def test_resuming_a_run_of_another_version(refusal: Refusal, demo: Demo) -> None:
    settings = demo.prepare(1, 1) / "settings.json"
    settings.write_text('{"steps": 1, "colour": "red"}')
    message = f"{settings} was not written by this version of castwise demo: start a new run without --resume"
    assert refusal("--resume", settings.parent) == message


def test_resuming_with_other_settings(refusal: Refusal, demo: Demo) -> None:
    message = refusal("--resume", demo.prepare(1, 1), "--steps", 3, "--checkpoint-every", 2)
    assert message == "--resume uses the settings in the run's folder: omit --steps, --checkpoint-every"


def test_resuming_on_changed_text(refusal: Refusal, demo: Demo) -> None:
    folder = demo.prepare(1, 1)
    demo.text.write_text(demo.text.read_text() + "one more line")
    message = f"the text of {demo.text} has changed since {folder} was started: start a new run"
    assert refusal("--resume", folder) == message


def test_resuming_with_metrics_shorter_than_the_checkpoint_knows(refusal: Refusal, demo: Demo) -> None:
    folder = demo.prepare(1, 1)
    checkpoint.save(folder / "checkpoint.pt", Checkpoint([], None, metrics_bytes=9))
    message = f"{folder / 'metrics.jsonl'} was changed: it has 0 bytes, but its checkpoint expects at least 9"
    assert refusal("--resume", folder) == message


def damaged(path: Path) -> str:
    return f"{path} is damaged or not a checkpoint of castwise demo: delete it to start this run over"


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 and no more"])
def test_resuming_from_something_else_than_a_checkpoint(refusal: Refusal, demo: Demo, content: bytes) -> None:
    path = demo.prepare(1, 1) / "checkpoint.pt"
    path.write_bytes(content)
    assert refusal("--resume", path.parent) == damaged(path)


def test_resuming_from_a_checkpoint_of_another_model(refusal: Refusal, demo: Demo) -> None:
    path = demo.prepare(1, 1) / "checkpoint.pt"
    checkpoint.save(path, Checkpoint([], {"model": {"weight": torch.ones(1)}}, 0))
    message = f"{path} does not fit the model in the run's settings: delete it to start over"
    assert refusal("--resume", path.parent) == message


def test_resuming_a_run_that_is_still_at_work(refusal: Refusal, demo: Demo) -> None:
    folder = demo.prepare(1, 1)
    with closing(MetricsFile(folder / "metrics.jsonl", 0)):
        message = refusal("--resume", folder)
    assert message == f"{folder} is in use by another process: wait for it or stop it"


def test_a_full_disk(refusal: Refusal, demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = demo.prepare(1, 1)
    monkeypatch.setattr(os, "fsync", no_space)
    assert refusal("--resume", folder) == f"cannot write {folder / 'metrics.jsonl'}: No space left on device"


def test_ctrl_c_before_the_training(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(data: Path) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "read_text", interrupted)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # pytest wants to hear Ctrl-C later
    with pytest.raises(SystemExit) as exit_:
        app(["demo", "--data", str(demo.text), "--out", str(demo.out)])
    assert exit_.value.code == 130
    assert capsys.readouterr().err == "castwise demo: stopped; nothing was written yet\n"


def test_a_real_process_shows_one_line_and_no_traceback(demo: Demo) -> None:
    path = demo.prepare(1, 1) / "checkpoint.pt"
    path.write_bytes(b"")
    command = [sys.executable, "-m", "castwise", "demo", "--resume", path.parent]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stderr) == (2, f"castwise demo: {damaged(path)}\n")


def test_a_wrong_option_shows_no_traceback(demo: Demo) -> None:
    code, _, stderr = demo.run("--colour", "red")
    assert code == 2
    assert stderr.startswith("castwise demo: no such option: --colour")
    assert "Traceback" not in stderr


def test_a_name_that_no_file_can_have(refusal: Refusal) -> None:
    path = "a" * 300
    message = f"--data {path} cannot be read ([Errno 36] File name too long: '{path}')"
    assert refusal("--data", path) == f"{message}: use a text file, or a folder of text files"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 0),
        ("threads", 10**6),
        ("threads", "x"),
        ("data", 5),
        ("device", None),
        ("emulated", ["fp99"]),
        ("emulated", [[]]),
    ],
)
def test_resuming_a_run_whose_settings_were_changed_by_hand(
    refusal: Refusal, demo: Demo, name: str, value: object
) -> None:
    settings = demo.prepare(1, 1) / "settings.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {name: value}))
    message = f"{settings} was not written by this version of castwise demo: start a new run without --resume"
    assert refusal("--resume", settings.parent) == message


def test_a_folder_that_may_not_be_entered_is_left_out(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = demo.text.parent / "locked"
    locked.mkdir()
    is_file = Path.is_file

    def refused(path: Path) -> bool:  # for root every folder is open
        if path.parent == locked:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert corpus.read_text(demo.text.parent) == demo.text.read_bytes()


def test_a_path_that_the_terminal_cannot_show(demo: Demo) -> None:
    folder = demo.text.with_name("\u00fc\udcff")
    folder.mkdir()
    arguments = ["--data", demo.text, "--out", folder, "--steps", "1", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, "-m", "castwise", "demo", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    assert "\\xfc\\udcff" in run.stdout
