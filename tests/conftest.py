"""Hypothesis profiles: `--hypothesis-profile=long` is for a run by hand."""

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=1000, derandomize=True, **_COMMON)
settings.register_profile("long", max_examples=30_000, **_COMMON)
settings.load_profile("ci")
