"""Scripts that cannot import torch, such as one line: they run at once, because torch takes seconds to load."""

from __future__ import annotations

import atexit
import os
import sys

from castwise._cli.own_frames import end_by_interrupt, hide_own_frames
from castwise._cli.program import Program


def run_without_torch(program: Program) -> None:
    """Run a script and re-raise its exceptions."""
    sys.excepthook = sys.__excepthook__  # typer replaced it
    interrupted: list[BaseException] = []
    atexit.register(_finish, interrupted)
    try:
        program.execute()
    except SystemExit:
        raise
    except BaseException as error:
        interrupted += [error] if isinstance(error, KeyboardInterrupt) else []
        hide_own_frames()
        raise


def _finish(interrupted: list[BaseException]) -> None:
    if os.environ.get("RANK", "0") == "0":
        print("castwise: the script does not import torch, so nothing was recorded", file=sys.stderr)
    if interrupted:
        end_by_interrupt()
