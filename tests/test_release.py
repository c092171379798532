"""What is released: the archives, what they say of themselves, and the package installed from the wheel alone."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

import castwise
from castwise.__main__ import HELP
from castwise._cli import app
from castwise._doctor.notes import notes_on

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "castwise"
EMPTY = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}  # no PYTHONPATH: nothing leads back to the source


class Built(NamedTuple):
    sdist: Path
    wheel: Path
    """Made from the sdist."""
    straight: Path
    """Made from the working tree."""


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, arguments)), capture_output=True, text=True, env=EMPTY | environment, timeout=300
    )


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    for arguments in (["--outdir", folder], ["--wheel", "--outdir", folder / "straight"]):
        done = run(sys.executable, "-m", "build", "--no-isolation", ROOT, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,), (straight,) = folder.glob("*.tar.gz"), folder.glob("*.whl"), folder.glob("straight/*.whl")
    return Built(sdist, wheel, straight)


@pytest.fixture(scope="session")
def about(built: Built) -> metadata.PathDistribution:
    """What the wheel says of itself."""
    return metadata.PathDistribution(zipfile.Path(built.wheel, f"castwise-{castwise.__version__}.dist-info/"))


def files_of(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not {"__pycache__", "_build"} & set(path.parts)}


def test_the_wheel_is_the_package_and_nothing_else(built: Built) -> None:
    names = zipfile.ZipFile(built.wheel).namelist()
    inside = {name.removeprefix("castwise/") for name in names if name.startswith("castwise/")}
    assert inside == files_of(SOURCE)
    assert {"py.typed", "report/templates/report.html.j2"} <= inside
    beside = {name.partition("/")[2] for name in names if not name.startswith("castwise/")}
    assert beside == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_the_sdist_builds_the_same_wheel_and_holds_what_the_tests_need(built: Built) -> None:
    assert built.wheel.read_bytes() == built.straight.read_bytes()
    with tarfile.open(built.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    for folder in ("src", "tests", "docs", "examples", "benchmarks"):
        assert {f"{folder}/{name}" for name in files_of(ROOT / folder)} <= names
    beside = {"noxfile.py", "Makefile", "constraints.txt", "CONTRIBUTING.md", "SECURITY.md"}
    assert beside | {".pre-commit-config.yaml", ".github/workflows/ci.yml"} <= names


def test_twine_finds_nothing_to_complain_of(built: Built) -> None:
    done = run(sys.executable, "-m", "twine", "check", "--strict", built.sdist, built.wheel, built.straight)
    assert done.returncode == 0, done.stdout + done.stderr


def test_metadata_version_and_changelog_agree(about: metadata.PathDistribution, built: Built) -> None:
    newest = re.search(r"^## \[(\S+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert about.version == castwise.__version__ == newest[1]
    assert built.wheel.name == f"castwise-{castwise.__version__}-py3-none-any.whl"
    assert built.sdist.name == f"castwise-{castwise.__version__}.tar.gz"


def test_licence_and_classifiers(about: metadata.PathDistribution) -> None:
    facts = about.metadata
    assert (facts["License-Expression"], facts.get_all("License-File")) == ("BSD-3-Clause", ["LICENSE"])
    assert "Redistribution and use in source and binary forms" in (ROOT / "LICENSE").read_text()
    classifiers = facts.get_all("Classifier") or []
    assert not [line for line in classifiers if line.startswith("License")]  # PEP 639: it would contradict
    minors = [line.rpartition(" ")[2] for line in classifiers if re.search(r"Python :: 3\.\d+$", line)]
    assert minors == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert facts["Requires-Python"] == f">={minors[0]}"
    assert "Typing :: Typed" in classifiers


def test_without_extras_only_torch_is_needed(about: metadata.PathDistribution) -> None:
    needed = [Requirement(line) for line in about.requires or []]
    assert [str(each) for each in needed if each.marker is None] == ["torch>=2.11"]


def test_reports_come_with_numpy_without_which_torch_warns(about: metadata.PathDistribution) -> None:
    needed = [Requirement(line) for line in about.requires or []]
    of_report = {each.name for each in needed if each.marker and each.marker.evaluate({"extra": "report"})}
    assert {"numpy", "plotly"} <= of_report


def test_every_extra_that_is_named_exists(about: metadata.PathDistribution) -> None:
    extras = set(about.metadata.get_all("Provides-Extra") or [])
    required = [Requirement(line) for line in about.requires or []]
    assert set(re.findall(r'extra == "(\w+)"', " ".join(str(each.marker) for each in required))) == extras
    assert "castwise" not in {each.name for each in required}  # those that refer to each other are spelled out
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *SOURCE.rglob("*.py")]
    named = {
        extra
        for text in texts
        for group in re.findall(r"castwise\[([\w,]+)\]", text.read_text())
        for extra in group.split(",")
    }
    assert {"cli", "report"} <= named <= extras


def test_the_source_is_that_of_the_oldest_python() -> None:
    for path in (*SOURCE.rglob("*.py"), ROOT / "noxfile.py"):
        ast.parse(path.read_text(), feature_version=(3, 10))


def link(target: Path, *roots: str) -> None:
    """Make distributions, and all that they require, visible in another site-packages."""
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another system or Python
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (target / top).exists():
                (target / top).symlink_to(Path(str(found.locate_file(top))))
        requirements = map(Requirement, found.requires or [])
        waiting += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment with the wheel and torch, and nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(folder), "--disable-pip-version-check", "install"]
    done = run(*pip, "--quiet", "--no-deps", "--no-index", "--no-compile", built.wheel)
    assert done.returncode == 0, done.stderr
    link(site, "torch")
    yield folder
    shutil.rmtree(folder)


USE = """
import castwise, castwise.monitor._monitor, castwise._installation, castwise._doctor.checkup
print(castwise.__file__)
"""


def test_the_wheel_alone_is_the_library(installed: Path) -> None:
    used = run(installed / "bin" / "python", "-c", USE)
    assert Path(used.stdout.strip()).is_relative_to(installed), used.stderr


def test_the_wheel_alone_tells_its_version_and_what_the_command_line_needs(installed: Path) -> None:
    command = installed / "bin" / "castwise"
    assert run(command, "--version").stdout == f"castwise {castwise.__version__}\n"
    result = run(command, "--help")
    assert (result.returncode, result.stdout) == (0, HELP)
    commands = sorted(str(each.name or each.callback.__name__) for each in app.registered_commands if each.callback)
    assert f"The commands {', '.join(commands[:-1])} and {commands[-1]} need the `cli` extra" in HELP
    refused = run(command, "report")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.splitlines()[-1] == "castwise: the command line needs typer: pip install 'castwise[cli]'"
    assert run(command, "check", "train.py").returncode == 125


# What bash does at the tab key after `castwise re`.
COMPLETE = """
eval "$(castwise --show-completion)"
COMP_WORDS=(castwise re)
COMP_CWORD=1
_castwise_completion castwise
echo "${COMPREPLY[@]}"
"""


def test_the_command_line_and_its_completion_work_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    (site,) = installed.glob("lib/python*/site-packages")
    link(site, "typer", "rich", "plotly", "jinja2")
    path = f"{installed / 'bin'}:{os.environ['PATH']}"
    assert run("castwise", "--version", PATH=path).stdout == f"castwise {castwise.__version__}\n"
    for arguments in (["--help"], ["report", "--help"]):
        result = run("castwise", *arguments, PATH=path)
        assert result.returncode == 0, result.stderr
        assert result.stdout.lstrip().startswith("Usage: castwise"), result.stdout
    assert run("bash", "-c", COMPLETE, PATH=path).stdout == "report\n"
    (tmp_path / "monitor.jsonl").write_text('{"kind": "run", "format": 1, "settings": {}}\n')
    reported = run("castwise", "report", tmp_path, PATH=path)
    assert (reported.returncode, reported.stdout) == (0, f"wrote {tmp_path / 'report.html'}\n"), reported.stderr


def test_ci_runs_the_same_script_on_every_python_that_is_classified() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    listed = re.search(r"python: \[(.*)\]", workflow)
    assert listed is not None
    project = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r"[\d.]+", listed[1]) == re.findall(r"Python :: (3\.\d+)", project)
    assert "run: .ci/run" in workflow


def test_ci_installs_the_torch_that_the_manual_says() -> None:
    page = (ROOT / "docs" / "explanation" / "testing.md").read_text()
    said = re.search(r"CI runs torch (\d+\.\d+) on Python (3\.\d+) to (3\.\d+)", page)
    assert said is not None
    pinned = re.search(r"^torch==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert said.groups() == (pinned[1], pythons[0], pythons[-1])


def test_the_tested_range_of_torch_is_the_same_everywhere() -> None:
    script = (ROOT / "benchmarks" / "torch_versions.py").read_text()
    versions = re.findall(r'"(2\.\d+)"', script.partition("\nVERSIONS = ")[2].partition("\n")[0])
    record = json.loads((ROOT / "benchmarks" / "results" / "torch_versions.json").read_text())
    assert [*record] == versions
    oldest, newest = versions[0], versions[-1]
    makefile = (ROOT / "Makefile").read_text()
    for target, version in (("newest", newest), ("oldest", oldest)):
        assert f"\n{target}:\n\t$(PYTHON) benchmarks/torch_versions.py {version} --all\n" in makefile
    assert f'dependencies = ["torch>={oldest}"]' in (ROOT / "pyproject.toml").read_text()
    assert f"tested with {oldest} to {newest}" in (ROOT / "README.md").read_text()
    assert f"tested with torch {oldest} to {newest}" in (ROOT / "docs" / "index.md").read_text()
    assert f"Checked against torch {oldest} to {newest}" in (SOURCE / "_torch_private.py").read_text()
    assert not any("newer than" in note.text for note in notes_on(f"{newest}.1"))
    major, minor = newest.split(".")
    assert any(f"newer than {newest}" in note.text for note in notes_on(f"{major}.{int(minor) + 1}"))


def test_tests_that_need_a_gpu_run_only_if_they_are_asked_for(request: pytest.FixtureRequest) -> None:
    options = re.search(r'^addopts = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert options is not None
    assert options[1].endswith(" -m 'not gpu and not text'")
    files = {str(item.path): item.path.read_text() for item in request.session.items if item.get_closest_marker("gpu")}
    assert files == {} or "not gpu" not in request.config.getoption("-m")


def test_every_hook_runs_a_tool_that_the_extra_dev_installs() -> None:
    entries = re.findall(r"entry: \.venv/bin/([\w-]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert set(entries) == {"ruff", "mypy", "codespell", "python"}
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert set(entries) - {"python"} <= pinned
