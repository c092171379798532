"""The ends of scripts that castwise runs, as without castwise."""

from __future__ import annotations

import os
import signal
import sys
from types import TracebackType

from castwise._cli.model_errors import is_ours


def hide_own_frames() -> None:
    """Start tracebacks at the script, as without castwise, also where a hook of the script prints them."""
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        error.__traceback__ = own = _without_ours(traceback)
        shown(kind, error, own)

    sys.excepthook = show


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    own = traceback
    while own is not None:
        if not (is_ours(own) or _starts_us(own)):
            return own
        own = own.tb_next
    return traceback


def _starts_us(traceback: TracebackType) -> bool:
    """Return True for a frame of the program `castwise` or of `python -m castwise`."""
    file = os.path.basename(traceback.tb_frame.f_code.co_filename)
    return file in {"runpy.py", "castwise", "castwise.exe"}


def end_by_interrupt() -> None:
    """End by SIGINT, as Python does after Ctrl-C in a script; here it runs castwise, perhaps as a module."""
    if sys.platform != "win32":
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
