"""A demo that takes three seconds: every precision on the model for slow ones, in one thread, on a page of text.

One thread, because two that wait for each other on a busy machine are twenty times slower.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.forked import Python

from castwise.demo.corpus import Corpus, read_text
from castwise.demo.gpt import SIZES
from castwise.demo.run_folder import create_run_folder
from castwise.demo.settings import Settings

PATIENCE_S = 60.0


class Demo:
    """A `castwise demo` in its own process, which is forked, fed with `text`, writing to `out`."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "runs"
        self.text = folder / "text.txt"
        self.text.write_text("".join(f"line {n} of {n * n} lines\n" for n in range(500)))

    def start(self, *arguments: object) -> Python:
        return Python(["-m", "castwise", "demo", *arguments])

    def run(self, *arguments: object) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        return process.returncode, stdout, stderr

    def prepare(self, steps: int, checkpoint_every: int) -> Path:
        """The folder of a run that has not begun."""
        corpus = Corpus(read_text(self.text), SIZES["tiny"].context)
        settings = Settings(
            data=str(self.text),
            preset="tiny",
            steps=steps,
            device="cpu",
            checkpoint_every=checkpoint_every,
            seed=0,
            threads=1,
            emulated=["fp32", "bf16", "fp16"],
            strategy=None,
            processes=1,
            text_digest=corpus.digest,
        )
        return create_run_folder(self.out, settings.to_json())

    @staticmethod
    def wait_until(moment: Callable[[], object], process: Python) -> None:
        """Look often, as moments pass in milliseconds, but leave the process a core to reach them on."""
        give_up = time.monotonic() + PATIENCE_S
        while not moment():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < give_up, "the moment never came"
            time.sleep(0.0005)

    @staticmethod
    def metrics(folder: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def untimed_metrics(self, folder: Path) -> list[dict[str, Any]]:
        """The metrics without what differs between any two runs."""
        timed = {"tokens_per_s", "time"}
        return [{k: v for k, v in line.items() if k not in timed} for line in self.metrics(folder)]

    @staticmethod
    def digests(folder: Path) -> list[str]:
        summary = json.loads((folder / "summary.json").read_text())
        return [f"{row['precision']} {row['library']} {row['weights_sha256']}" for row in summary["results"]]


@pytest.fixture(scope="session")
def demo_in() -> type[Demo]:
    """For fixtures that share one demo among many tests."""
    return Demo


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    return Demo(tmp_path)
