"""What is said of a mistake, and where in the script it was made."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from castwise._torch_private import never_traced

_LIBRARIES = (
    os.path.dirname(os.path.abspath(inspect.getfile(torch))) + os.sep,
    str(Path(__file__).absolute().parents[2]) + os.sep,
)
_RUNNERS = {"contextlib.py", "runpy.py", "threading.py"}


@dataclass(frozen=True)
class Place:
    """A line of a script.

    Args:
        file: Its path.
        line: From 1.
    """

    file: str
    line: int

    @property
    def source(self) -> str:
        """The line itself, without indentation; empty if it cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Mistake:
    """One mistake of a script.

    Args:
        name: Its kind, such as `"clipped-while-scaled"`.
        text: The mistake, and its consequence.
        corrected: The line or lines that do it right, in the words of the script where that is possible.
        place: Where it is made; None if that cannot be seen.
    """

    name: str
    text: str
    corrected: str
    place: Place | None = None

    def __str__(self) -> str:
        where = "" if self.place is None else f"{self.place}: "
        now = "" if self.place is None or not self.place.source else f"\n    now:     {self.place.source}"
        return f"{where}{self.text}{now}\n    {self._correct()}"

    def message(self) -> str:
        """Return it as a warning says it, which has the place and the line by itself."""
        return f"{self.text}\n    {self._correct()}"

    def _correct(self) -> str:
        return "correct: " + self.corrected.replace("\n", "\n             ")

    def record(self) -> dict[str, Any]:
        """Return it as a monitor records it."""
        place = self.place or Place("", 0)
        return {
            "kind": "mistake",
            "name": self.name,
            "text": self.text,
            "corrected": self.corrected,
            "file": place.file,
            "line": place.line,
            "source": place.source,
        }


@never_traced
def caller() -> Place | None:
    """Return the line of the script that has called torch or castwise: in a thread of torch's, what waits for it."""
    place = _outside(sys._getframe(1))
    if place is None and threading.current_thread() is not threading.main_thread():
        waiting = sys._current_frames().get(threading.main_thread().ident or 0)
        place = None if waiting is None else _outside(waiting)
    return place


def passes_through(*files: str) -> bool:
    """Return True if a function in one of these files, given by their ends, is being called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.replace(os.sep, "/").endswith(files):
            return True
        frame = frame.f_back
    return False


def _outside(frame: FrameType | None) -> Place | None:
    while frame is not None:
        if not _is_passed_over(frame.f_code.co_filename):
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def line_of_model(outside: str) -> Place | None:
    """Return the line of a model's own code that has called torch, None if it is castwise that has.

    Args:
        outside: The file that asks, which torch has called.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_passed_over(file):
            return Place(file, frame.f_lineno)
        if file != outside and os.path.abspath(file).startswith(_LIBRARIES[1]):
            return None
        frame = frame.f_back
    return None


@functools.cache
def _is_passed_over(file: str) -> bool:
    """Return True if a file belongs to what a script calls, or to what calls the script."""
    whole = os.path.abspath(file)
    return file.startswith("<frozen ") or whole.startswith(_LIBRARIES) or os.path.basename(file) in _RUNNERS
