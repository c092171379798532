from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.forked import Python

from castwise._cli import app
from castwise._demo import command, corpus

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
    message = f"cannot write {out}: Not a directory"
    assert refusal("--data", demo.text, "--out", out) == message


def test_no_steps(refusal: Refusal, demo: Demo) -> None:
    assert refusal("--data", demo.text, "--out", demo.out, "--steps", 0) == "--steps must be at least 1, got 0"
    assert not demo.out.exists()


def test_a_device_the_demo_does_not_know(refusal: Refusal) -> None:
    assert refusal("--device", "meta") == "--device must be cpu or cuda, got 'meta'"


def test_a_gpu_that_is_not_there(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal("--device", "cuda") == "--device cuda: torch finds no CUDA device; use --device cpu"


def test_other_weights(refusal: Refusal) -> None:
    assert refusal("--weights", "bf16") == "--weights must be one of fp32, bf16-split, got 'bf16'"


def test_ctrl_c(demo: Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(data: Path) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "read_text", interrupted)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # pytest needs Ctrl-C later
    with pytest.raises(SystemExit) as exit_:
        app(["demo", "--data", str(demo.text), "--out", str(demo.out)])
    assert exit_.value.code == 130
    assert capsys.readouterr().err == "castwise demo: stopped\n"


def test_a_real_process_shows_one_line_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "castwise", "demo", "--data", tmp_path / "none"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 2
    assert run.stderr.startswith("castwise demo: --data ")
    assert run.stderr.count("\n") == 1


def test_a_wrong_option_shows_no_traceback(demo: Demo) -> None:
    code, _, stderr = demo.run("--colour", "red")
    assert code == 2
    assert stderr.startswith("castwise demo: no such option: --colour")
    assert "Traceback" not in stderr


def test_a_name_that_no_file_can_have(refusal: Refusal) -> None:
    path = "a" * 300
    message = f"--data {path} cannot be read ([Errno 36] File name too long: '{path}')"
    assert refusal("--data", path) == f"{message}: use a text file, or a folder of text files"


def test_a_folder_that_may_not_be_entered_is_left_out(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = demo.text.parent / "locked"
    locked.mkdir()
    (locked / "more.txt").write_text("more")
    is_file = Path.is_file

    def refused(path: Path) -> bool:  # for root every folder is open
        if path.parent == locked:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert corpus.read_text(demo.text.parent) == demo.text.read_bytes()


def test_a_path_that_the_terminal_cannot_show(demo: Demo) -> None:
    folder = demo.text.with_name("\u00fc\udcff")
    script = demo.text.with_name("in_ascii.py")
    script.write_text(
        "import runpy, sys\nsys.stdout.reconfigure(encoding='ascii', errors='strict')\n"
        "runpy.run_module('castwise', run_name='__main__', alter_sys=True)\n"
    )
    arguments = ["--data", demo.text, "--out", folder, "--steps", "1", "--device", "cpu"]
    process = Python([script, "demo", *arguments])
    stdout, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, "")
    assert "\\xfc\\udcff" in stdout
