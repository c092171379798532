"""Ctrl-C as a request: training stops at a step boundary, where there is a state worth saving."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from typing_extensions import Self


class StopOnInterrupt:
    """Within this context Ctrl-C sets `requested`; pressed again, it raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
