"""Telemetry: what a training run records about its numbers, and where that goes."""

from castwise._lazy_modules import submodules_of

__getattr__ = submodules_of(__name__)
