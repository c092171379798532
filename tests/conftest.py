"""Hypothesis profiles (`--hypothesis-profile=long` is for a run by hand), and which tests share a process."""

import pytest
from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=1000, derandomize=True, **_COMMON)
settings.register_profile("long", max_examples=30_000, **_COMMON)
settings.load_profile("ci")

# Fixtures that take many seconds, once for all tests of a module that are in one process.
_SHARED = {"ranks", "four_ranks", "undisturbed", "in_one_process", "outcome"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in sorted(_SHARED.intersection(getattr(item, "fixturenames", ()))):
            item.add_marker(pytest.mark.xdist_group(f"{item.path}:{name}"))
