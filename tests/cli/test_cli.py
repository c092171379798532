"""The command line as a whole: what it loads, completes and says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import castwise


def run_python(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    return done.stdout


def modules_loaded_by(*arguments: str, **environment: str) -> set[str]:
    """The modules that Python reports on stderr while `castwise ARGUMENTS` runs."""
    done = subprocess.run(
        [sys.executable, "-v", "-m", "castwise", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert done.stdout
    return {line.split()[1].strip("'") for line in done.stderr.splitlines() if line.startswith("import ")}


def typed(line: str) -> dict[str, str]:
    """The environment in which bash asks to complete the last word of a line."""
    return {"_CASTWISE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}


def test_version_is_the_packages_own() -> None:
    assert run_python("-m", "castwise", "--version") == f"castwise {castwise.__version__}\n"


def test_the_library_never_loads_its_command_line() -> None:
    loaded = run_python("-c", "import castwise, sys; castwise.GradScaler; print(*sys.modules)").split()
    assert {"typer", "rich", "castwise.cli"}.isdisjoint(loaded)


@pytest.mark.parametrize(
    "arguments",
    ["--version", "--help", *(f"{name} --help" for name in ("bench", "demo", "doctor", "report", "run", "trace"))],
)
def test_version_and_help_import_no_torch(arguments: str) -> None:
    loaded = modules_loaded_by(*arguments.split())
    assert "castwise.cli" in loaded
    assert "torch" not in loaded


def test_completion_imports_no_torch() -> None:
    loaded = modules_loaded_by(**typed("castwise trace --policy bf16_"))
    assert "castwise.cli" in loaded
    assert "torch" not in loaded


def test_the_test_of_torch_can_fail(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    assert "torch" in modules_loaded_by("run", "--out", str(tmp_path / "out"), str(tmp_path / "script.py"))
