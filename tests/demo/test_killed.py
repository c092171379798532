from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from castwise.demo import checkpoint

if TYPE_CHECKING:
    from tests.demo.conftest import Demo
    from tests.forked import Python

STEPS, EVERY = 30, 7
Moment = Callable[[], object]


@pytest.fixture(scope="module")
def undisturbed(demo_in: type[Demo], tmp_path_factory: pytest.TempPathFactory) -> Path:
    demo = demo_in(tmp_path_factory.mktemp("undisturbed"))
    folder = demo.prepare(STEPS, EVERY)
    assert demo.run("--resume", folder)[0] == 0
    return folder


def has_lines(folder: Path, n_lines: int) -> Moment:
    return lambda: (folder / "metrics.jsonl").read_bytes().count(b"\n") >= n_lines


def changes(folder: Path, files: str) -> Moment:
    """True from the first instant of one of these files being written, whether aside or in place."""

    def look() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in folder.glob(files)}

    before = look()
    return lambda: look() != before


def stop_at(demo: Demo, moment: Moment, process: Python, *signals: signal.Signals) -> str:
    """Send the signals at that moment; returns what the process said on stderr."""
    demo.wait_until(moment, process)
    for number in signals:
        process.send_signal(number)
    return process.communicate()[1]


def assert_resumes_to(undisturbed: Path, demo: Demo, folder: Path) -> None:
    code, _, stderr = demo.run("--resume", folder)
    assert (code, stderr) == (0, "")
    assert demo.digests(folder) == demo.digests(undisturbed)
    assert demo.untimed_metrics(folder) == demo.untimed_metrics(undisturbed)


def test_a_run_killed_at_every_kind_of_moment_resumes_to_the_same_bits(undisturbed: Path, demo: Demo) -> None:
    folder = demo.prepare(STEPS, EVERY)
    moments = {
        "before the first step": has_lines(folder, 0),
        "before the first checkpoint": has_lines(folder, EVERY - 1),
        "after the last step of a training": has_lines(folder, STEPS),
        "in the middle of a training": has_lines(folder, 3 * STEPS + EVERY + 1),
        "after the last step of all": has_lines(folder, 6 * STEPS),
    }
    for name, moment in moments.items():
        process = demo.start("--resume", folder)
        stop_at(demo, moment, process, signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL or name == "after the last step of all"
    assert_resumes_to(undisturbed, demo, folder)


def test_a_run_killed_while_it_writes_a_checkpoint_resumes_to_the_same_bits(undisturbed: Path, demo: Demo) -> None:
    folder = demo.prepare(STEPS, EVERY)
    for _ in range(2):
        process = demo.start("--resume", folder)
        stop_at(demo, changes(folder, "checkpoint*"), process, signal.SIGKILL)
    assert_resumes_to(undisturbed, demo, folder)


def test_a_run_killed_at_random_moments_resumes_to_the_same_bits(undisturbed: Path, demo: Demo) -> None:
    folder = demo.prepare(STEPS, EVERY)
    for n_lines in sorted(random.Random(0).sample(range(EVERY, 6 * STEPS - EVERY, EVERY), k=2)):
        process = demo.start("--resume", folder)
        demo.wait_until(has_lines(folder, n_lines), process)
        time.sleep(random.uniform(0, 0.02))
        process.kill()
        process.communicate()
    assert_resumes_to(undisturbed, demo, folder)


def test_ctrl_c_leaves_a_checkpoint_of_the_last_step(undisturbed: Path, demo: Demo) -> None:
    folder = demo.prepare(STEPS, checkpoint_every=10 * STEPS)
    process = demo.start("--resume", folder)
    stderr = stop_at(demo, has_lines(folder, STEPS + 5), process, signal.SIGINT)
    assert process.returncode == 130
    assert stderr == f"castwise demo: stopped; continue with: castwise demo --resume {folder}\n"
    n_lines = len(demo.metrics(folder))
    saved = checkpoint.load(folder / "checkpoint.pt")
    assert saved.trainer is not None
    assert len(saved.results) * STEPS + len(saved.trainer["seconds"]) == n_lines

    process = demo.start("--resume", folder)
    stderr = stop_at(demo, has_lines(folder, n_lines + 1), process, signal.SIGINT, signal.SIGINT)
    assert process.returncode == 130
    assert stderr.count("\n") == 1
    assert_resumes_to(undisturbed, demo, folder)
