"""Sessions for each supported Python that is installed: `nox --list` shows them, CONTRIBUTING.md explains them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["tests", "lint", "docs", "build"]
nox.options.reuse_existing_virtualenvs = True

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


def _install(session: nox.Session, *what: str) -> None:
    session.install("--constraint", "constraints.txt", *what)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run all tests, or those named after `--`."""
    _install(session, "--editable", ".[dev]")
    arguments = session.posargs or ["--numprocesses", "auto", "--maxprocesses", "4"]
    # As in the Makefile: one thread per process, which does not spin while it waits.
    spin = os.environ.get("GOMP_SPINCOUNT", "10000")
    session.run("python", "-m", "pytest", *arguments, env={"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": spin})


@nox.session(python=PYTHONS)
def lint(session: nox.Session) -> None:
    """Check style, types and spelling."""
    _install(session, "--editable", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", "--python-version", str(session.python))
    session.run("codespell")


@nox.session(python=PYTHONS)
def docs(session: nox.Session) -> None:
    """Build the manual; warnings are errors."""
    _install(session, "--editable", ".[docs]")
    session.run("sphinx-build", "-W", "--keep-going", "-n", "docs", "build/docs")


@nox.session(python=PYTHONS)
def build(session: nox.Session) -> None:
    """Build wheel and sdist, resolve every extra, and run the command line from the wheel alone."""
    _install(session, "build", "twine")
    with tempfile.TemporaryDirectory() as folder:
        session.run("python", "-m", "build", "--outdir", folder)
        made = sorted(map(str, Path(folder).iterdir()))
        session.run("twine", "check", "--strict", *made)
        (wheel,) = (path for path in made if path.endswith(".whl"))
        released = f"@ {Path(wheel).as_uri()}"
        for extra in nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]:
            session.install("--dry-run", f"castwise[{extra}] {released}")  # with the newest versions
        _install(session, "--force-reinstall", f"castwise[report] {released}")
        with session.chdir(folder):  # so that the source is not imported
            session.run("castwise", "--version")
            session.run("castwise", "--help", silent=True)
            session.run("castwise", "trace", "--json", silent=True)
