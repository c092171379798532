"""The examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import castwise

MODULES = [module.name for module in pkgutil.walk_packages(castwise.__path__, "castwise.")]
MODULES += [f"benchmarks.{name}" for name in ("benchmark", "machine", "pairing", "recording")]
WITH_EXAMPLES = [
    "castwise.amp.autocast_mode",
    "castwise.amp.grad_scaler",
    "castwise.weights._weight_cache",
    "benchmarks.pairing",
]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert name not in WITH_EXAMPLES or result.attempted > 0
