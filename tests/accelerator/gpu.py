"""Counts of how often the host waits for a GPU, as those of the simulated accelerator."""

from __future__ import annotations

import collections
import contextlib
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from castwise.amp._readback import Readback


class Counted:
    """What a block asks of the GPU.

    Attributes:
        waits: How often the host waited for an event of castwise's, and for the stream, as CUDA's debug mode sees it.
        lines: How often each line waited for the stream.
    """

    def __init__(self) -> None:
        self.waits: dict[str, int] = {}
        self.lines: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> Counted:
        torch.cuda.synchronize()
        self._undo = contextlib.ExitStack()
        self._warned = self._undo.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        wait, counts = Readback.wait, collections.Counter[str]()

        def counted(readback: Readback) -> torch.Tensor:
            counts["event"] += readback._arrived is not None
            return wait(readback)

        self._undo.enter_context(mock.patch.object(Readback, "wait", counted))
        self._undo.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("warn")
        self._counts = counts
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        for warning in self._warned:
            if "synchronizing CUDA operation" in str(warning.message):
                self._counts["stream"] += 1
                self.lines[f"stream in {Path(warning.filename).name}:{warning.lineno}"] += 1
        self.waits = {name: count for name, count in self._counts.items() if count}


def captured(step: Any, batch: torch.Tensor, warm: int) -> None:
    """Capture a step in a CUDA graph, after warm ones on a side stream, and replay it twice."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            step(batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(batch)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
