"""Telemetry: record the numerics of a training run and send the records to sinks."""

from typing import TYPE_CHECKING

from castwise._faces import face

if TYPE_CHECKING:
    from castwise.monitor._formats import BF16, E4M3, E5M2, FP16, FP32, Format
    from castwise.monitor._monitor import Monitor
    from castwise.monitor._recorded_run import Run
    from castwise.monitor._sinks import JSONL, Record, Sink, Sinks, TensorBoard
else:
    __getattr__, __dir__ = face(
        __name__,
        {
            "BF16": "_formats",
            "E4M3": "_formats",
            "E5M2": "_formats",
            "FP16": "_formats",
            "FP32": "_formats",
            "Format": "_formats",
            "JSONL": "_sinks",
            "Monitor": "_monitor",
            "Record": "_sinks",
            "Run": "_recorded_run",
            "Sink": "_sinks",
            "Sinks": "_sinks",
            "TensorBoard": "_sinks",
        },
    )

__all__ = [
    "BF16",
    "E4M3",
    "E5M2",
    "FP16",
    "FP32",
    "JSONL",
    "Format",
    "Monitor",
    "Record",
    "Run",
    "Sink",
    "Sinks",
    "TensorBoard",
]
