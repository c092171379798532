"""Loading a file never runs code that is in it: what SECURITY.md promises."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import castwise

SOURCE = Path(castwise.__file__).parent
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
# What torch sends by pickle, between ranks that trust each other.
OF_RANKS = {("amp/_agreement.py", "all_gather_object")}
# Copies of arguments that a process makes for itself: never written, never read.
IN_MEMORY = {("comparison/_kept_values.py", "pickle")}
CALLS = {"eval", "exec", "compile", "__import__"}
# What the user names on the command line to be run.
ALLOWED = {(f"_cli/{file}", call) for file in ("program.py", "traced_model.py") for call in ("compile", "exec")}


def what_may_run_code(code: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module} if node.module.split(".")[0] in MODULES else set()
            if node.module == "torch":
                found |= {"torch.load" for alias in node.names if alias.name == "load"}
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            named = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            is_loading = name in {"torch.load", "torch.jit.load", "torch.hub.load", "torch.serialization.load"}
            if name in CALLS or (is_loading and named.get("weights_only") != "True"):
                found.add(name)
            if re.search(r"(gather|scatter|reduce|broadcast)_object(_list)?$", name):
                found.add(name.rpartition(".")[2])
            if named.get("allow_pickle") == "True":
                found.add("allow_pickle")
    return found


def test_nothing_in_the_library_loads_what_may_run_code() -> None:
    found = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path in SOURCE.rglob("*.py")
        for name in what_may_run_code(path.read_text())
    }
    assert found == ALLOWED | OF_RANKS | IN_MEMORY


@pytest.mark.parametrize(
    "code",
    [
        *("import pickle", "from pickle import loads", "import yaml", "import torch.load as x; eval('1')"),
        *("torch.load(path)", "torch.load(path, weights_only=False)", "from torch import load", "exec(code)"),
        *("import shelve as s", "def f():\n    import marshal", "numpy.load(path, allow_pickle=True)"),
        "dist.gather_object(1)",
    ],
)
def test_the_test_can_fail(code: str) -> None:
    assert what_may_run_code(code)
    assert not what_may_run_code(
        "torch.load(path, weights_only=True); model.eval(); ast.literal_eval(text); re.compile(x)"
    )


NETWORK = {"aiohttp", "asyncio", "ftplib", "http", "httpx", "requests", "smtplib", "socket", "ssl", "urllib", "urllib3"}


def network_modules(code: str) -> set[str]:
    """Return the modules that open connections, among those that code imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
    return {name for name in names if name.partition(".")[0] in NETWORK} - {"urllib.parse"}  # which takes texts apart


def test_nothing_in_the_library_opens_a_connection() -> None:
    assert {path: found for path in SOURCE.rglob("*.py") if (found := network_modules(path.read_text()))} == {}
    assert network_modules("import json\ndef f():\n    from urllib.request import urlopen") == {"urllib.request"}


def work(read: Callable[[], object]) -> int:
    """Return the number of calls and returns, of Python's and of C's functions, that reading takes."""
    events = Counter[str]()
    sys.setprofile(lambda frame, event, argument: events.update([event]))
    try:
        read()
    finally:
        sys.setprofile(None)
    return events.total()


def policy_of(count: int, path: Path) -> Callable[[], object]:
    castwise.Policy("bfloat16", modules={f"block.{i}": "float32" for i in range(count)}).to_file(path)
    return lambda: castwise.Policy.from_file(path)


def trace_of(count: int, path: Path) -> Callable[[], object]:
    steps = [castwise.schedules.GradientRange(1.0, dict.fromkeys(range(20), 1)) for _ in range(count)]
    castwise.schedules.write_trace(path, steps)
    return lambda: castwise.schedules.read_trace(path)


@pytest.mark.parametrize(("write", "name"), [(policy_of, "a.toml"), (policy_of, "a.json"), (trace_of, "a.trace")])
def test_a_file_of_twice_the_size_takes_twice_the_work(
    write: Callable[[int, Path], Callable[[], object]], name: str, tmp_path: Path
) -> None:
    write(10, tmp_path / name)()  # imports what it needs
    once, twice = (work(write(count, tmp_path / name)) for count in (200, 400))
    assert once > 400
    assert twice < 2.1 * once
