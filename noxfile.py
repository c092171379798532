"""Every supported Python, as far as this machine has it: `nox --list` shows the sessions; CONTRIBUTING.md says more."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["tests", "lint", "docs", "build"]
nox.options.reuse_existing_virtualenvs = True

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def _install(session: nox.Session, *what: str) -> None:
    # Of some packages the pinned versions are for Python >= 3.11 only.
    pins = [] if session.python == "3.10" else ["--constraint", "constraints.txt"]
    session.install(*pins, *what)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """All tests, or those named after `--`."""
    _install(session, "--editable", ".[dev]")
    arguments = session.posargs or ["--numprocesses", "auto", "--maxprocesses", "4"]
    # As in the Makefile: a process a core, of one thread each, which does not spin while it waits.
    spin = os.environ.get("GOMP_SPINCOUNT", "10000")
    session.run("python", "-m", "pytest", *arguments, env={"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": spin})


@nox.session(python=PYTHONS)
def lint(session: nox.Session) -> None:
    """Style and types."""
    _install(session, "--editable", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", "--python-version", str(session.python))


@nox.session(python=PYTHONS)
def docs(session: nox.Session) -> None:
    """The manual, without warnings."""
    _install(session, "--editable", ".[docs]")
    session.run("sphinx-build", "-W", "--keep-going", "-n", "docs", "build/docs")


@nox.session(python=PYTHONS)
def build(session: nox.Session) -> None:
    """Wheel and sdist, and the command line from the wheel alone."""
    _install(session, "build", "twine")
    with tempfile.TemporaryDirectory() as folder:
        session.run("python", "-m", "build", "--outdir", folder)
        made = sorted(map(str, Path(folder).iterdir()))
        session.run("twine", "check", "--strict", *made)
        (wheel,) = (path for path in made if path.endswith(".whl"))
        _install(session, "--force-reinstall", f"castwise[report] @ {Path(wheel).as_uri()}")
        with session.chdir(folder):  # away from the source
            session.run("castwise", "--version")
            session.run("castwise", "trace", "--json", silent=True)
