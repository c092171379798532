"""Tracebacks of errors in the user's code, without castwise's frames above it."""

from __future__ import annotations

import os
import traceback
from types import TracebackType

import typer

import castwise

MODEL_ERROR = 1
_OURS = os.path.abspath(castwise.__path__[0]) + os.sep


def print_from_model(error: Exception) -> None:
    """Print an error with its traceback, which begins in the user's code.

    Raises:
        Exception: `error` itself, if the user's code and torch's modules did not run.
    """
    frames = _walk(error.__traceback__)
    starts = [frame for frame in frames if not is_ours(frame) and not _is_in_torch(frame)]
    starts = starts or [
        frame for frame in frames if _is_in_torch(frame) and os.path.join("nn", "modules") in _file(frame)
    ]
    if not starts:
        raise error
    typer.echo("".join(traceback.format_exception(type(error), error, starts[0])), err=True, nl=False)


def is_ours(frame: TracebackType) -> bool:
    """Return True for a frame of castwise, or of Python's imports."""
    return os.path.abspath(_file(frame)).startswith(_OURS) or _file(frame).startswith("<frozen")


def _is_in_torch(frame: TracebackType) -> bool:
    return str(frame.tb_frame.f_globals.get("__name__")).partition(".")[0] == "torch"


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


def _walk(frame: TracebackType | None) -> list[TracebackType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    return frames
