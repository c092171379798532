"""Telemetry: what a training run records about its numbers, and where that goes."""
