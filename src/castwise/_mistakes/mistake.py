"""`Mistake`: a mistake's report, and `Place`: its line in the script."""

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

import torch

from castwise._notebook import cell_of
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
        file: Path of the script.
        line: Line number, from 1.
    """

    file: str
    line: int

    @property
    def source(self) -> str:
        """The text of the line without indentation; empty if it cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{cell_of(self.file) or self.file}:{self.line}"


@dataclass(frozen=True)
class Mistake:
    """One mistake in a script.

    Args:
        name: Kind of mistake, such as `"clipped-while-scaled"`.
        text: The mistake and its consequence.
        corrected: The corrected line or lines, with the script's own names where possible.
        place: The line with the mistake; None if it is not known.
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
        """Return the text of the warning. Python adds the place and the line."""
        return f"{self.text}\n    {self._correct()}"

    def _correct(self) -> str:
        return "correct: " + self.corrected.replace("\n", "\n             ")


@never_traced
def caller() -> Place | None:
    """Return the line of the script that called torch or castwise.

    In one of torch's own threads, return the line of the main thread that waits for it.
    """
    place = _outside(sys._getframe(1))
    if place is None and threading.current_thread() is not threading.main_thread():
        waiting = sys._current_frames().get(threading.main_thread().ident or 0)
        place = None if waiting is None else _outside(waiting)
    return place


def passes_through(*files: str) -> bool:
    """Return True if the call stack contains a file whose path ends with one of these."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.replace(os.sep, "/").endswith(files):
            return True
        frame = frame.f_back
    return False


def _outside(frame: FrameType | None) -> Place | None:
    while frame is not None:
        if not is_passed_over(frame.f_code.co_filename):
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def line_of_model(outside: str) -> Place | None:
    """Return the line of the model's code that called torch; None if castwise called it.

    Args:
        outside: The calling file, which torch called; its frames are ignored.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_passed_over(file):
            return Place(file, frame.f_lineno)
        if file != outside and _is_of_castwise(file):
            return None
        frame = frame.f_back
    return None


@functools.cache
def _is_of_castwise(file: str) -> bool:
    return os.path.abspath(file).startswith(_LIBRARIES[1])


@functools.cache
def is_passed_over(file: str) -> bool:
    """Return True if a file belongs to torch, castwise, or the machinery that runs the script."""
    path = os.path.abspath(file)
    return file.startswith("<frozen ") or path.startswith(_LIBRARIES) or os.path.basename(file) in _RUNNERS
