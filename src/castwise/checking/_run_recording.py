"""`RunRecording`: a golden file of the first steps of a running script."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks

from castwise._guard import ErrorBoundary
from castwise.checking._golden import Golden
from castwise.checking._measuring import about_process
from castwise.checking._recorder import EndOfRun, Recorder

STEPS = 3


class RunRecording:
    """Records the first steps of each optimizer from now on, and writes them to a golden file after the last.

    Gradients, updates and buffers are recorded in the program's own dtypes: the run is not repeated, so there is
    neither float64 nor random rounding. The host waits for the device in these steps, and keeps a copy of the weights
    during each. Nothing is written if a part of the recording fails.

    Args:
        path: The file. If there is one, nothing is recorded.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._recorder = Path(path), Recorder(STEPS, ends_late=True, others=False)
        self._is_over = self._path.exists()
        self._guard = ErrorBoundary("no golden file is recorded, because a part of it failed", is_final=True)
        register = optimizer_hooks.register_optimizer_step_pre_hook, optimizer_hooks.register_optimizer_step_post_hook
        doors = self._guard.door(self._stepping), self._guard.door(self._stepped)
        self._handles = [] if self._is_over else [add(door) for add, door in zip(register, doors, strict=True)]

    def remove(self) -> None:
        """Remove the hooks. A recording that has not ended is dropped. Not to be called in an optimizer's step."""
        for handle in self._handles:
            handle.remove()

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_over:
            try:
                self._recorder.stepping(optimizer, args, kwargs)
            except EndOfRun:  # one optimizer has taken more steps than another
                self._write()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_over:
            self._recorder.stepped(optimizer, args, kwargs)
            if self._recorder.has_ended():
                self._write()

    def _write(self) -> None:
        self._is_over = True
        self._recorder.finish()
        measured = self._recorder.measurement
        about = {**about_process(), "ranks": 1, "commit": None, "is_of_a_run": True}
        golden = Golden(measured.steps, "unknown", about, measured.settings, measured.digests)
        golden.probes = measured.probes
        golden.save(self._path)
        del self._recorder
