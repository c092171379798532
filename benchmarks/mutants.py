"""Small faults planted in castwise.amp, one at a time: do the tests notice? mutmut plants them and runs the tests.

    python benchmarks/mutants.py [MODULE ...]

Of each module the tests are its own, `tests/amp/test_MODULE.py`, or those that `tests/mutants.toml` names: a fault is
to be noticed where a reader looks for it. What mypy refuses counts as noticed, as it would be in CI. Without arguments,
those modules are tried that have changed since they were last recorded, or whose tests have. Ctrl-C stops; what was
run of the module at hand is kept in `mutants/`: of a function that is as it was, only survivors are tried again.

Survivors are explained in `tests/mutants.toml` by what was changed; one that is not makes this exit with 1.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Container
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mutmut.stats import status_by_exit_code

import recording
from castwise.bench.recording import headline

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
AMP = ROOT / "src" / "castwise" / "amp"
RECORD = recording.HERE / "results" / "mutants.json"
KNOWN = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())
MARKS = {"never_traced", "only_inlined", "run_while_tracing"}
NOT_KILLED = {"survived", "no tests", "suspicious", "segfault"}
SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = ["src/castwise/amp/{module}.py"]
also_copy = ["README.md", "docs", "examples", "benchmarks"]
pytest_add_cli_args = [
    "--hypothesis-profile=quick", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not compil",
]  # Dynamo cannot trace trampolines
pytest_add_cli_args_test_selection = {tests}
timeout_constant = 60.0  # other work on the machine is no reason to call a mutant noticed
timeout_multiplier = 2.0
process_isolation = "forkserver"  # torch is not to be forked once it has computed
use_git_change_detection = false
type_check_command = [
    "{python}", "-m", "mypy", "--output=json", "--no-warn-unused-ignores", "src/castwise/amp/{module}.py"
]
"""

# Added to castwise/_warnings.py: mutmut's frames are none that a user could be shown, and what was found out before a
# mutant is tried says nothing of it.
HELPERS = """

def warn(message: str, category: type[Warning], stacklevel: int) -> None:  # type: ignore
    import sys
    from types import FrameType

    levels: list[bool] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        levels.append(frame.f_code.co_filename.endswith("trampoline.py"))
        frame = frame.f_back
    ours = [level for level, is_mutmuts in enumerate(levels, 2) if not is_mutmuts]
    warnings.warn(message, category, stacklevel=ours[min(stacklevel, len(ours)) - 1])


def cached(function):  # type: ignore
    import functools
    import os

    of_mutant = functools.cache(lambda mutant, *args: function(*args))

    def called(*args):  # type: ignore
        mutant = os.environ.get("MUTANT_UNDER_TEST")
        if mutant == "stats":  # which tests come to which functions
            return function(*args)
        return of_mutant(mutant, *args)

    called.__wrapped__ = function  # type: ignore
    return called
"""
CACHED = "__import__('castwise._warnings', fromlist=['cached']).cached"


def tests_of(module: str) -> list[str]:
    """Return the files of the tests that are to notice faults of a module."""
    own = [f"test_{module}.py"] if (ROOT / "tests" / "amp" / f"test_{module}.py").exists() else []
    return [f"tests/amp/{name}" for name in KNOWN["tests"].get(module, own)]


def modules() -> list[str]:
    """Return the modules that have tests to notice anything."""
    return [path.stem for path in sorted(AMP.glob("*.py")) if tests_of(path.stem)]


def plain(source: str) -> str:
    """Return a module of which the functions are decorated after they are made: mutmut leaves out decorated ones.

    Those that only bear marks for Dynamo lose them: Dynamo meets mutmut's trampolines there anyway.
    """
    lines = source.splitlines()
    tree = ast.parse(source)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    functions = [
        (node, [ast.unparse(decorator) for decorator in node.decorator_list])
        for body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef)
    ]
    setters = {decorator for _, decorators in functions for decorator in decorators if decorator.endswith(".setter")}
    for node, decorators in sorted(functions, key=lambda function: -function[0].lineno):
        if decorators == ["overload"] and not node.col_offset:  # what mutmut puts before a function parts it from these
            del lines[node.decorator_list[0].lineno - 1 : node.end_lineno]
            continue
        stay = {"staticmethod", "classmethod", "overload", *setters}
        if not decorators or stay.intersection(decorators) or f"{node.name}.setter" in setters:
            continue
        left = [CACHED if decorator == "functools.cache" else decorator for decorator in decorators]
        left = [decorator for decorator in left if decorator.rpartition(".")[2] not in MARKS]
        if left:
            made = "(".join([*left, f"_plain_{node.name}"]) + ")" * len(left)
            lines.insert(node.end_lineno or 0, f"{' ' * node.col_offset}{node.name} = {made}  # type: ignore")
            first = lines[node.lineno - 1]
            lines[node.lineno - 1] = first.replace(f"def {node.name}(", f"def _plain_{node.name}(", 1)
        del lines[node.decorator_list[0].lineno - 1 : node.lineno - 1]
    return "\n".join(lines) + "\n"


def digest(module: str) -> str:
    """Return what changes with a module and with its tests."""
    tests = [(ROOT / name).read_text() for name in tests_of(module)]
    return hashlib.sha256("".join([plain((AMP / f"{module}.py").read_text()), *tests]).encode()).hexdigest()[:16]


def mutmut(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mutmut", *arguments], cwd=folder, text=True, **options)


def workplace(module: str) -> Path:
    """Return a folder in which mutmut finds one module and its tests."""
    folder = ROOT / "mutants" / module
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("src", "tests", "docs", "examples", "benchmarks"):  # no links: they confuse whoever builds an archive
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("_build", "__pycache__"))
    shutil.copy(ROOT / "README.md", folder)
    with (folder / "src" / "castwise" / "_warnings.py").open("a") as file:
        file.write(HELPERS)
    source = folder / "src" / "castwise" / "amp" / f"{module}.py"
    source.write_text(plain(source.read_text()))
    subprocess.run([sys.executable, "-m", "mypy", "--no-warn-unused-ignores", source], cwd=folder, check=True)
    settings = SETTINGS.format(module=module, tests=json.dumps(tests_of(module)), python=sys.executable)
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + settings)
    return folder


def forget_survivors(folder: Path, explained: Container[str]) -> None:
    """Have those run again that were not noticed: there may be tests now that notice. What is explained needs none."""
    for meta in (folder / "mutants").rglob("*.meta"):
        content = json.loads(meta.read_text())
        codes = content["exit_code_by_key"]
        content["exit_code_by_key"] = {
            name: None if status_by_exit_code[code] in NOT_KILLED and name not in explained else code
            for name, code in codes.items()
        }
        meta.write_text(json.dumps(content, indent=4))


def change(folder: Path, name: str) -> tuple[str, str]:
    """Return the lines that a mutant takes away, and those it puts in their place."""
    shown = mutmut(folder, "show", name, capture_output=True, check=True).stdout
    lines = [line for line in shown.splitlines() if not line.startswith(("---", "+++"))]
    was, now = (" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    return was, now


def tried(module: str, before: dict[str, Any]) -> dict[str, Any]:
    """Run the tests on every mutant of a module; `before` is what was recorded of it."""
    tests, at_first = tests_of(module), digest(module)
    survivors = before.get("survivors", ())
    explained = {survivor.get("name", "") for survivor in survivors if reason(module, survivor) != "unexplained"}
    folder = workplace(module)
    (folder / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)  # tests may come to other functions now
    forget_survivors(folder, explained)
    mutmut(folder, "run", "--max-children", "2", check=True)
    (meta,) = (folder / "mutants" / "src" / "castwise" / "amp").glob("*.meta")
    statuses = {
        name: status_by_exit_code[code] for name, code in json.loads(meta.read_text())["exit_code_by_key"].items()
    }
    counts = Counter(status for status in statuses.values() if status not in NOT_KILLED)
    survivors = [
        {"name": name, "was": was, "now": now, "status": status}
        for name, status in statuses.items()
        if status in NOT_KILLED
        for was, now in [change(folder, name)]
    ]
    return {
        "date": datetime.date.today().isoformat(),
        "digest": at_first,
        "tests": tests,
        "mutants": len(statuses),
        "counts": dict(sorted(counts.items())),
        "survivors": survivors,
    }


def reason(module: str, survivor: dict[str, str]) -> str:
    """Return why a fault that is not noticed is no gap."""
    for why, what in KNOWN["harmless"].items():
        if re.sub(what, r"\1", survivor["was"]) == re.sub(what, r"\1", survivor["now"]):
            return str(why)
    for why, group in KNOWN["survivors"].items():
        for each in group:
            if (each["module"], each["was"], each["now"]) == (module, survivor["was"], survivor["now"]):
                return str(why)
    return "unexplained"


def table(record: dict[str, Any]) -> str:
    """Return how many faults of each module ended in which way."""
    rows = {}
    for module, of_module in record["modules"].items():
        rows[module] = Counter(of_module["counts"])
        rows[module].update(reason(module, survivor) for survivor in of_module["survivors"])
    columns = sorted({column for counts in rows.values() for column in counts})
    total: Counter[str] = sum(rows.values(), Counter())
    lines = [["castwise.amp", "mutants", *columns], ["---"] * (len(columns) + 2)]
    for module, counts in [*rows.items(), ("all", total)]:
        lines.append([module, str(counts.total()), *(str(counts[column]) for column in columns)])
    return "\n".join([headline(record), "", *(f"| {' | '.join(line)} |" for line in lines)])


def main() -> None:
    """Try modules, record them, and name what nobody has explained."""
    before = json.loads(RECORD.read_text())["modules"] if RECORD.exists() else {}
    found: dict[str, Any] = {module: of_module for module, of_module in before.items() if module in modules()}
    stale = [module for module in modules() if module not in found or found[module]["digest"] != digest(module)]
    unknown = set(sys.argv[1:]) - set(modules())
    if unknown:
        sys.exit(f"no tests for {', '.join(sorted(unknown))}: modules are {', '.join(modules())}")
    about = recording.machine() | {"mutmut": version("mutmut"), "command": "make mutants"}
    for module in sys.argv[1:] or stale:
        found[module] = tried(module, before.get(module, {}))
        record = {**about, "modules": dict(sorted(found.items()))}
        recording.write("mutants", record, table(record))
    unexplained = [
        f"{module}: {survivor['was']} -> {survivor['now']}"
        for module, of_module in found.items()
        for survivor in of_module["survivors"]
        if reason(module, survivor) == "unexplained"
    ]
    if unexplained:
        sys.exit("\n".join(["no test notices, and tests/mutants.toml does not explain:", *unexplained]))


if __name__ == "__main__":
    main()
