"""Telemetry: record the numerics of a training run and send the records to sinks."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
