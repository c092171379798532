"""`make gpu` cannot be tried here as a whole; its parts can."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.__main__ import parse
from benchmarks.gpu import Part, parts, run
from typer.testing import CliRunner

from benchmarks import gpu
from castwise._cli import app


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_commands_are_understood(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _, _, benchmarks, demo = parts(device, tmp_path)
    options = parse(benchmarks.arguments[2:])
    assert (options.device, options.only, options.out) == (device, list(gpu.BENCHMARKS), tmp_path)
    known = CliRunner().invoke(app, [*demo.arguments[2:], "--help"])
    assert known.exit_code == 0, known.output


def test_all_parts_together_end_in_nine_minutes() -> None:
    first_pages = 10
    assert sum(part.seconds for part in parts("cuda", gpu.RESULTS)) + first_pages <= 9 * 60


def test_what_fails_or_takes_too_long_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(Part("good", ("-c", "print('done')"), 60)) == ""
    assert run(Part("bad", ("-c", "raise SystemExit(3)"), 60)) == "bad: exit code 3"
    assert run(Part("slow", ("-c", "import time; time.sleep(60)"), 1)) == "slow: not done after 1 s"
    assert "done" in capfd.readouterr().out


def test_the_rest_is_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def failing(part: Part) -> str:
        done.append(part.name)
        return part.name

    monkeypatch.setattr(gpu, "run", failing)
    assert gpu.main([]) == 1
    assert done == [*(part.name for part in parts("cuda", gpu.RESULTS)), "first pages"]
