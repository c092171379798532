"""Telemetry: record the numerics of a training run and send the records to sinks."""

from typing import TYPE_CHECKING

from castwise._faces import face

if TYPE_CHECKING:
    from castwise.monitor._expected_writes import expected_writes
    from castwise.monitor._formats import BF16, E4M3, E5M2, FP16, FP32, Format
    from castwise.monitor._monitor import Monitor
    from castwise.monitor._recorded_run import Run
    from castwise.monitor._records import (
        AloneRecord,
        DiagnosisRecord,
        EndRecord,
        Exponents,
        FormatFit,
        InvariantRecord,
        LostRecord,
        MistakeRecord,
        NormsRecord,
        Operand,
        QuantizedLayer,
        Record,
        RunRecord,
        SampleRecord,
        Stats,
        StepRecord,
        Update,
    )
    from castwise.monitor._sinks import JSONL, RecordSink, Sink, Sinks, TensorBoard
else:
    __getattr__, __dir__ = face(
        __name__,
        {
            "AloneRecord": "_records",
            "BF16": "_formats",
            "DiagnosisRecord": "_records",
            "E4M3": "_formats",
            "E5M2": "_formats",
            "EndRecord": "_records",
            "Exponents": "_records",
            "FP16": "_formats",
            "FP32": "_formats",
            "Format": "_formats",
            "FormatFit": "_records",
            "InvariantRecord": "_records",
            "JSONL": "_sinks",
            "LostRecord": "_records",
            "MistakeRecord": "_records",
            "Monitor": "_monitor",
            "NormsRecord": "_records",
            "Operand": "_records",
            "QuantizedLayer": "_records",
            "Record": "_records",
            "RecordSink": "_sinks",
            "Run": "_recorded_run",
            "RunRecord": "_records",
            "SampleRecord": "_records",
            "Sink": "_sinks",
            "Sinks": "_sinks",
            "Stats": "_records",
            "StepRecord": "_records",
            "TensorBoard": "_sinks",
            "Update": "_records",
            "expected_writes": "_expected_writes",
        },
    )

__all__ = [
    "BF16",
    "E4M3",
    "E5M2",
    "FP16",
    "FP32",
    "JSONL",
    "AloneRecord",
    "DiagnosisRecord",
    "EndRecord",
    "Exponents",
    "Format",
    "FormatFit",
    "InvariantRecord",
    "LostRecord",
    "MistakeRecord",
    "Monitor",
    "NormsRecord",
    "Operand",
    "QuantizedLayer",
    "Record",
    "RecordSink",
    "Run",
    "RunRecord",
    "SampleRecord",
    "Sink",
    "Sinks",
    "Stats",
    "StepRecord",
    "TensorBoard",
    "Update",
    "expected_writes",
]
