"""What the manual is built with can be imported, and the manual is built once."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manual, built as `make docs` builds it."""
    out = tmp_path_factory.mktemp("manual")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-d", str(out / "doctrees")]
    run = subprocess.run([*command, str(ROOT / "docs"), str(out / "html")], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return out / "html"
