"""Run broken scripts and their healthy twins under castwise, and judge the answers.

    python -m benchmarks.broken_scripts

Each script in benchmarks/broken names its cause and remedy in the docstring, and marks the line with the fault. With
BROKEN=0 it is its own healthy twin. Those in its folder public have faults that were reported to public projects, in
this project's own words, and name the report. Those in held_out have too, and were written before castwise ran on
them, with what the fix of the report says; of each, the record keeps what castwise answered first. Words of a cause or
remedy are apart by " | " if each of them is right. Writes benchmarks/results/broken_scripts-cpu.json and the table in
benchmarks/README.md.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import tempfile
import time
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

import castwise
from benchmarks import recording
from benchmarks.recording import headline
from castwise.monitor._run_files import read_runs
from castwise.report._summary import Summary

FOLDER = Path(__file__).parent / "broken"
RESULT = Path(__file__).parent / "results" / "broken_scripts-cpu.json"
ASKED = ("cause", "line", "remedy")


def main() -> None:
    torch.set_num_threads(1)
    scripts, public, held_out = (
        {path.stem: judged(path) for path in sorted(folder.glob("*.py"))}
        for folder in (FOLDER, FOLDER / "public", FOLDER / "held_out")
    )
    before = json.loads(RESULT.read_text()).get("held_out", {})
    for name, answered in held_out.items():
        answered["first"] = before[name]["first"] if name in before else [answered[key] for key in ASKED]
    record = {"machine": recording.machine(), "scripts": scripts, "public": public, "held_out": held_out}
    recording.write("broken_scripts-cpu", record, table(record))
    print(table(record))


def judged(path: Path) -> dict[str, Any]:
    """Run a script and its twin, and compare the answers with what the script says of itself."""
    lines = path.read_text().splitlines()
    expected = {key: _named(lines, key) for key in ("Cause", "Remedy")}
    marked = [number for number, line in enumerate(lines, 1) if line.endswith("# <- fault")]
    broken, healthy = answer(path, is_broken=True), answer(path, is_broken=False)
    text = broken["text"].lower()
    places = [int(number) for number in re.findall(rf"{path.name}:(\d+)", broken["text"])]
    source = {"source": _named(lines, "Source")} if path.parent != FOLDER else {}
    return {
        "fault": lines[0].strip('"'),
        **source,
        "cause": _is_said(expected["Cause"], text) and broken["is_reported"],
        "line": marked[0] in places if marked else None,
        "remedy": _is_said(expected["Remedy"], text) if expected["Remedy"] else None,
        "false_alarm": healthy["is_reported"],
        "seconds": broken["seconds"],
    }


def _is_said(words: str, text: str) -> bool:
    return any(one.lower() in text for one in words.split(" | "))


def answer(path: Path, *, is_broken: bool) -> dict[str, Any]:
    """Run a script in a forked process, and return what the summary of its run says."""
    read, write = os.pipe()
    began = time.perf_counter()
    if not os.fork():
        os.close(read)
        with contextlib.suppress(BaseException):
            os.write(write, json.dumps(_watched(path, is_broken)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = json.loads(pipe.read() or '{"text": "", "is_reported": false}')
    os.wait()
    return {**found, "seconds": time.perf_counter() - began}


def _watched(path: Path, is_broken: bool) -> dict[str, Any]:
    os.environ["BROKEN"] = str(int(is_broken))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("default")  # as in a script; nothing reads them here
        castwise.install(folder, on_nonfinite="diagnose")
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                runpy.run_path(str(path), run_name="__main__")
        finally:
            castwise.uninstall()
        summary = Summary.of(read_runs([folder]))
    first = summary.first_finding
    is_reported = bool(summary.mistakes) or (first is not None and first.severity in {"critical", "warning"})
    texts = [*summary.lines(), *(mistake.corrected for mistake in summary.mistakes)]
    return {"text": " ".join(" ".join(texts).split()), "is_reported": is_reported}


def _named(lines: list[str], key: str) -> str:
    return next(line.removeprefix(f"{key}: ").strip() for line in lines if line.startswith(f"{key}:")).removeprefix(
        f"{key}:"
    )


def table(record: dict[str, Any]) -> str:
    return "\n".join(
        [
            *(headline(record["machine"]), "", *_rows(record["scripts"])),
            *("", "Faults that were reported to public projects:", "", *_rows(record["public"])),
            *("", _about_held_out(record["held_out"].values()), "", *_rows(record["held_out"])),
        ]
    )


def _about_held_out(scripts: Collection[dict[str, Any]]) -> str:
    first = in_full(one["first"] for one in scripts)
    now = in_full([one[key] for key in ASKED] for one in scripts)
    changed = (
        f"castwise was then changed for them, and the table shows today's answers: {now}"
        if any(one["first"] != [one[key] for key in ASKED] for one in scripts)
        else "the code has not been changed for them"
    )
    return (
        "Held out: faults that were reported to public projects, written after the code. When castwise first ran on "
        f"them, it answered {first} of {len(scripts)} in full; {changed}."
    )


def in_full(answers: Iterable[list[bool | None]]) -> int:
    """Return how many answers, of cause, line and remedy, have nothing wrong."""
    return sum(False not in one for one in answers)


def _rows(scripts: dict[str, Any]) -> list[str]:
    shown = {True: "yes", False: "**no**", None: "-"}
    rows = [
        f"| {_linked(one)} | {shown[one['cause']]} | {shown[one['line']]} | {shown[one['remedy']]} | "
        f"{'**yes**' if one['false_alarm'] else 'no'} | {one['seconds']:.1f} |"
        for one in scripts.values()
    ]
    right = in_full([one[key] for key in ASKED] for one in scripts.values())
    alarms = sum(one["false_alarm"] for one in scripts.values())
    total = f"{right} of {len(scripts)} answered in full; false alarms for {alarms} of {len(scripts)} healthy twins."
    head = ["| script | cause | line | remedy | false alarm | seconds |", "|---|---|---|---|---|---|"]
    return [*head, *rows, "", total]


def _linked(one: dict[str, Any]) -> str:
    if "source" not in one:
        return str(one["fault"])
    report = re.sub(r"https://github.com/(.+)/(?:issues|pull)/", r"\1#", one["source"])
    return f"{one['fault']} [{report}]({one['source']})"


if __name__ == "__main__":
    main()
