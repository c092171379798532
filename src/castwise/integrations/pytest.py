"""A pytest plugin with the fixture `castwise_check`.

It is off until a conftest.py has `pytest_plugins = ["castwise.integrations.pytest"]`, because pytest would load it, and
torch, in every run of every project.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from castwise.checking import check, record


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--castwise-record`."""
    parser.getgroup("castwise").addoption(
        "--castwise-record", action="store_true", help="write the files of castwise_check instead of checking"
    )


@pytest.fixture
def castwise_check(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return `run(train, golden, *, steps=3)`, which fails the test if `castwise.checking.check` finds a difference.

    `golden` is a path relative to the folder of the test; recording makes its folder. `train` and `steps` are
    those of `castwise.checking.record`.
    """

    def run(train: Callable[..., Any], golden: str | os.PathLike[str], *, steps: int = 3) -> None:
        path = Path(request.path.parent, golden)
        if request.config.getoption("--castwise-record"):
            path.parent.mkdir(parents=True, exist_ok=True)
            record(train, steps).save(path)
            return
        if not path.exists():
            pytest.fail(f"there is no {path}: write it with `pytest --castwise-record`", pytrace=False)
        result = check(train, path)
        if result.exit_code:
            pytest.fail("\n".join(result.lines()), pytrace=False)

    return run
