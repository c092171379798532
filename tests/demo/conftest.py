"""A demo that takes two seconds: on a page of text, in one thread.

One thread, because two that wait for each other on a busy machine are twenty times slower.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.forked import Python

PATIENCE_S = 60.0


class Demo:
    """A `castwise demo` in its own process, which is forked, fed with `text`, writing to `out`."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "runs"
        self.text = folder / "text.txt"
        self.text.write_text("".join(f"line {n} of {n * n} lines\n" for n in range(200)))

    def run(self, *arguments: object) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        given = ["--data", self.text, "--out", self.out, "--device", "cpu", *arguments]
        process = Python(["-m", "castwise", "demo", *given])
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        return process.returncode, stdout, stderr


@pytest.fixture(scope="session")
def demo_in() -> type[Demo]:
    """For fixtures that share one demo among many tests."""
    return Demo


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    return Demo(tmp_path)
