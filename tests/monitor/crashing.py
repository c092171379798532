"""Writers of records that are killed at random moments, and what they had acknowledged by then.

PYTHONPATH=. python tests/monitor/crashing.py 200    # so many kills: the long form; the tests make a few
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from castwise.monitor import Run
from castwise.monitor._gzip_members import members
from castwise.monitor._record_file import FILE_NAME

# Each step is acknowledged by a line to a pipe once the sink has returned. Samples are thinned often.
WRITER = """
import itertools, os, sys, warnings
from castwise.monitor import _record_file as record_file
from castwise.monitor._sinks import JSONL
warnings.simplefilter("ignore")
record_file.SAMPLES_BYTES = 20_000
writer, first = int(sys.argv[2]), int(sys.argv[3])
sink = JSONL(sys.argv[1])
sink({"kind": "run", "format": 2, "time": 0.0, "settings": {"writer": writer}})
for step in itertools.count(first):
    sink({"kind": "step", "step": step, "skipped": False, "loss": float(writer)})
    if step % 7 == 0:
        sink({"kind": "sample", "step": step, "scale": 1.0, "modules": {}, "x": "x" * 500})
    os.write(1, b"%d\\n" % step)
"""


class Outcome(NamedTuple):
    """What the kills have done.

    Args:
        kills: How many there were.
        acknowledged: Steps for which a sink had returned.
        lost: Those that no record has.
        unreadable: Records that cannot be read.
        mixed: Records in which a writer's steps follow the first line of another.
        left_behind: Temporary files that are still there after the last writer began.
    """

    kills: int
    acknowledged: int
    lost: int
    unreadable: int
    mixed: int
    left_behind: int


def kill_writers(folder: Path, kills: int, writers: int, seed: int) -> Outcome:
    """Start writers on one folder, kill each at a random moment, and start it again, until there were so many kills."""
    chance = random.Random(seed)
    acknowledged: set[tuple[int, int]] = set()
    following = dict.fromkeys(range(writers), 1)
    running = {writer: _start(folder, writer, 1) for writer in following}
    for kill in range(kills):
        writer = kill % writers
        time.sleep(chance.uniform(0.0, 0.05))
        _kill(running[writer], writer, acknowledged)
        following[writer] += 1_000_000  # no number is used twice
        if kill < kills - writers:
            running[writer] = _start(folder, writer, following[writer])
    last = _start(folder, 0, 10**9)
    _kill(last, 0, acknowledged)
    return _outcome(folder, kills, acknowledged)


def _start(folder: Path, writer: int, first: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITER, str(folder / "run"), str(writer), str(first)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), True)
    assert process.stdout.read(1)  # it has written a step
    return process


def _kill(process: subprocess.Popen[bytes], writer: int, acknowledged: set[tuple[int, int]]) -> None:
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    *whole, _ = output.split(b"\n")
    acknowledged.update((writer, int(step)) for step in whole[1:])  # of the first, a digit has been read


def _outcome(folder: Path, kills: int, acknowledged: set[tuple[int, int]]) -> Outcome:
    recorded: set[tuple[int, int]] = set()
    unreadable = mixed = 0
    for file in sorted(folder.glob(f"*/{FILE_NAME}")):
        try:
            Run.read(file)
        except ValueError:
            unreadable += 1
        with file.open("rb") as opened:
            lines = [json.loads(line) for line in members(opened)]
        steps = {(int(line["loss"]), line["step"]) for line in lines if line["kind"] == "step"}
        mixed += _has_mixed(lines)
        recorded |= steps
    left = sum(1 for path in folder.rglob(".castwise-*"))
    return Outcome(kills, len(acknowledged), len(acknowledged - recorded), unreadable, mixed, left)


def _has_mixed(lines: list[dict[str, Any]]) -> bool:
    writer = None
    for line in lines:
        if line["kind"] == "run":
            writer = line["settings"]["writer"]
        elif line["kind"] == "step" and line["loss"] != writer:
            return True
    return False


if __name__ == "__main__":
    for count in (1, 2):
        with tempfile.TemporaryDirectory() as where:
            print(f"{count} writers:", kill_writers(Path(where), int(sys.argv[1]), count, seed=count))
