"""What the manual is built with can be imported, and the manual is built once. `make docs` runs these tests."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm_python import with_frameworks

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "docs"):
            item.add_marker("text")


@pytest.fixture(scope="session")
def built() -> Path:
    """The manual, built anew in docs/_build; warnings are errors."""
    out = ROOT / "docs" / "_build"
    command = [with_frameworks(), "-m", "sphinx", "-E", "-W", "--keep-going", "-n", "-q", "-d", str(out / "doctrees")]
    run = subprocess.run([*command, str(ROOT / "docs"), str(out / "html")], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return out / "html"
