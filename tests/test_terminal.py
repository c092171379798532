"""Tables and progress in a terminal, a pipe and a file."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from castwise._doctor import checkup
from castwise._terminal import new_console, progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_what_is_done_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar() as progress:
        progress("cpu: fp32 [red]", 3, 11)
        assert "cpu: fp32 [red]" in terminal.getvalue()
        assert " 3/11" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is erased


def test_a_bar_is_not_shown_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar() as progress:
        progress("cpu", 3, 11)
    assert pipe.getvalue() == ""


def test_a_checkup_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []
    monkeypatch.setattr(checkup, "BUDGET_S", 0.1)
    checkup.examine(lambda *progress: calls.append(progress))
    assert [(done, total) for _, done, total in calls[:3]] == [(0, 11), (1, 11), (2, 11)]
    assert calls[0][0].startswith("cpu: fp32")


def test_paths_are_printed_as_they_are(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+") as file:
        new_console(80, file).print("[red]/:smile:")
        file.seek(0)
        assert file.read() == "[red]/:smile:\n"
