"""The code in README.md, in CONTRIBUTING.md and on the pages of the manual is run. docs/writing.md says how.

Pages are read by Sybil; the language of a block and the comment before it decide who runs it.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable, Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from sybil import Document, Example, Region, Sybil
from tests.warm_python import executable
from tests.warm_python import warm_python as warm_python
from tests.warm_python import warm_python_in_module as warm_python_in_module

import castwise

os.environ.setdefault("PYTHONHASHSEED", "0")  # or `castwise check` sets it, by starting a Python anew
ROOT = Path(__file__).parent
_MARKED = re.compile(
    r"^(?:"
    r"(?P<directive>(?P<fence>`{3,}|:{3,})\{.*?^(?P=fence)[ ]*$)"
    r"|[ ]*<!-- setup\n(?P<setup>.*?)^[ ]*-->[ ]*$"
    r"|(?:<!-- (?P<mark>prints|file|run)(?:: (?P<said>[^\n]*?))? -->\n+)?"
    r"[ ]*(?P<ticks>`{3,})(?P<language>[\w-]*)[ ]*\n(?P<code>.*?)^[ ]*(?P=ticks)[ ]*$"
    r")",
    re.M | re.S,
)
_COMMENT = re.compile(r"<!-- *(setup|prints|file|run|skip)\b")

# What a page's namespace holds beside its own names: itself, what its end undoes, and what its last block has printed.
_PAGE, _OUTSIDE, _PRINTED = "__page__", "__outside__", "__printed__"

# Subcommands whose arguments are read, and which are then not run.
_TAKE_LONG = {"demo": "trains for minutes", "doctor": "measures for seconds"}


def _blocks(document: Document) -> Iterator[Region]:
    """Find what is to be run. A block that would not run is an error."""
    page = types.ModuleType(f"page_{Path(document.path).stem.replace('-', '_')}")
    document.namespace = page.__dict__
    document.namespace.update({_PAGE: page, _OUTSIDE: contextlib.ExitStack()})
    marked = [match for match in _MARKED.finditer(document.text) if match["directive"] is None]
    for match in marked:
        kind = "setup" if match["setup"] is not None else match["mark"] or match["language"]
        if kind not in _RUN:
            raise ValueError(f"{document.path}, {document.line_column(match.start())}: no block may be {kind!r}")
        if _RUN[kind] is not None:
            yield Region(match.start(), match.end(), match, _RUN[kind])
    for comment in _COMMENT.finditer(document.text):
        if not any(match.start() <= comment.start() < match.end() for match in marked):
            where = f"{document.path}, {document.line_column(comment.start())}"
            raise ValueError(f"{where}: {comment[0]}... marks no block")


def _code(example: Example) -> str:
    return textwrap.dedent(example.parsed["code"] or example.parsed["setup"] or "")


def _on_a_cpu(code: str) -> str:
    # Also where there is a GPU: models and data of a page are where its hidden setup has made them.
    return re.sub(r"""(["'])cuda\1""", '"cpu"', code)


def _python(example: Example, code: str | None = None) -> None:
    code = _on_a_cpu(_code(example) if code is None else code)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if re.search(r"^>>> ", code, re.M):
            _doctest(example, code)
        else:
            exec(compile("\n" * example.line + code, example.path, "exec"), example.namespace)
    example.namespace[_PRINTED] = printed.getvalue()


def _doctest(example: Example, code: str) -> None:
    found = doctest.DocTestParser().get_doctest(code, {}, example.path, example.path, example.line)
    found.globs = example.namespace
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    if runner.run(found, out=output.append, clear_globs=False).failed:
        raise AssertionError("".join(output))


def _diff(example: Example) -> None:
    kept = [line[1:] for line in _code(example).splitlines() if not line.startswith("-")]
    _python(example, "\n".join(kept))


def _sh(example: Example) -> None:
    example.namespace[_PRINTED] = "".join(map(_run, _commands(example)))


def _in_its_place(example: Example) -> None:
    for words in _commands(example):
        _look_at(words)
    example.namespace[_PRINTED] = _run(shlex.split(example.parsed["said"]))


def _commands(example: Example) -> Iterator[list[str]]:
    for line in _code(example).replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def _look_at(words: list[str]) -> None:
    """Look whether a command could be run."""
    words = [word for i, word in enumerate(words) if not _is_assignment(words[: i + 1])]
    name, *rest = words
    if name not in _LOOK_AT:
        raise AssertionError(f"{name} is no command that conftest.py knows: {', '.join(_LOOK_AT)}")
    _LOOK_AT[name](rest)


def _is_assignment(words: list[str]) -> bool:
    return all(re.fullmatch(r"[A-Z_]+=\S*", word) for word in words)


def _run(words: list[str]) -> str:
    """Run a command that takes no more than seconds, and only look at others; return what it has printed."""
    _look_at(words)
    assigned = [word for i, word in enumerate(words) if _is_assignment(words[: i + 1])]
    name, *rest = words[len(assigned) :]
    if name == "castwise" and rest[0] not in _TAKE_LONG:
        command = ["-m", "castwise", *rest]
    elif name == "python" and rest[0] != "-m" and not (ROOT / rest[0]).is_file():  # ours have tests of their own
        command = rest
    elif name == "ranks":
        command = ["-m", "torch.distributed.run", "--standalone", *rest]
    else:
        return ""
    settings = dict(word.split("=", 1) for word in ("OMP_NUM_THREADS=1", "COLUMNS=120", *assigned))
    run = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, f"{shlex.join(words)} ended with {run.returncode}:\n{run.stdout}"
    return run.stdout


def _look_at_castwise(words: list[str]) -> None:
    import typer

    from castwise._cli import app

    group: Any = typer.main.get_command(app)
    outer = group.make_context("castwise", [], resilient_parsing=True)
    if words[0].startswith("-"):
        return
    name, command, rest = group.resolve_command(outer, words)
    if "--help" not in rest:
        command.make_context(name, rest)


def _look_at_python(words: list[str]) -> None:
    if words[0] == "-m":
        modules = {
            "castwise": _look_at_castwise,
            "torch.distributed.run": _look_at_torchrun,
            "pytest": _look_at_pytest,
            "benchmarks.gpu": _look_at_gpu_benchmark,
        }
        modules[words[1]](words[2:])
    else:
        _look_for(words[0])


def _look_at_torchrun(words: list[str]) -> None:
    # Never run: processes that find each other take many seconds, and pages name hosts that are not there.
    from torch.distributed.run import get_args_parser

    asked = get_args_parser().parse_args(words)
    if asked.module:
        assert asked.training_script == "castwise", asked.training_script
        _look_at_castwise(asked.training_script_args)
    else:
        _look_for(asked.training_script)


def _look_at_accelerate(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert words[0] == "launch", words
    asked = launch_command_parser().parse_args(words[1:])
    assert (asked.module, asked.training_script) == (True, "castwise"), words
    _look_at_castwise(asked.training_script_args)


def _look_for(script: str) -> None:
    assert any((folder / script).exists() for folder in (Path.cwd(), ROOT)), f"there is no {script}"


def _look_at_make(words: list[str]) -> None:
    targets = re.findall(r"^(?!\.PHONY)([\w./]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(words) <= set(targets), f"the Makefile has no {words}, but {targets}"


def _look_at_gpu_benchmark(words: list[str]) -> None:
    source = (ROOT / "benchmarks" / "gpu.py").read_text()
    for word in words:
        assert f'"{word}"' in source, f"benchmarks/gpu.py has no option {word}"


def _look_at_pip(words: list[str]) -> None:
    assert words[0] == "install", words
    for extras in re.findall(r"castwise\[(.*?)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(metadata("castwise").get_all("Provides-Extra") or ()), extras


def _look_at_pytest(words: list[str]) -> None:
    for word in words:
        if word.startswith("tests"):
            _look_for(word)


def _look_at_nox(words: list[str]) -> None:
    source = (ROOT / "noxfile.py").read_text()
    for name in [after for word, after in itertools.pairwise(words) if word == "-s"]:
        session, _, python = name.partition("-")
        assert f"def {session}(session" in source, f"noxfile.py has no session {session}"
        assert not python or f'"{python}"' in source, f"noxfile.py has no Python {python}"
    if "--" in words:
        _look_at_pytest(words[words.index("--") + 1 :])


_LOOK_AT: dict[str, Callable[[list[str]], None]] = {
    "castwise": _look_at_castwise,
    "python": _look_at_python,
    "torchrun": _look_at_torchrun,
    "ranks": _look_at_torchrun,
    "accelerate": _look_at_accelerate,
    "make": _look_at_make,
    "pip": _look_at_pip,
    "nox": _look_at_nox,
    "source": lambda words: None,  # what `make` has made
    "pre-commit": lambda words: None,  # optional, and not installed by `make`
    "zcat": lambda words: None,  # a test of the files runs it
}


def _prints(example: Example) -> None:
    expected = _code(example)
    printed = example.namespace.get(_PRINTED, "")
    if example.parsed["said"] == "nearly":
        expected = _with_decimals_of(printed, expected)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not doctest.OutputChecker().check_output(expected, printed, options):
        raise AssertionError(f"the block before prints\n\n{printed}\nand the page says\n\n{expected}")


_ROUNDED = re.compile(r"-?\d+\.\d+(?:e[+-]\d+)?|-?\d{5,}")


def _with_decimals_of(printed: str, expected: str) -> str:
    """Put numbers that are printed in the place of those expected, where they are within 1% of these."""
    said = iter(_ROUNDED.findall(printed))

    def nearest(number: re.Match[str]) -> str:
        other = next(said, number[0])
        return other if math.isclose(float(other), float(number[0]), rel_tol=0.01) else number[0]

    return _ROUNDED.sub(nearest, expected)


def _file(example: Example) -> None:
    path = Path(example.parsed["said"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_on_a_cpu(_code(example)) if path.suffix == ".py" else _code(example))


def _toml(example: Example) -> None:
    _may_be_a_policy(tomllib.loads(_code(example)), _code(example), ".toml")


def _json(example: Example) -> None:
    _may_be_a_policy(json.loads(_code(example)), _code(example), ".json")


def _may_be_a_policy(content: Any, text: str, suffix: str) -> None:
    if isinstance(content, dict) and "compute" in content:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"policy{suffix}")
            path.write_text(text)
            castwise.Policy.from_file(path)


def _jsonl(example: Example) -> None:
    for line in _code(example).splitlines():
        json.loads(line)


_RUN: dict[str, Callable[[Example], None] | None] = {
    "setup": _python,
    "python": _python,
    "diff": _diff,
    "sh": _sh,
    "toml": _toml,
    "json": _json,
    "jsonl": _jsonl,
    "prints": _prints,
    "file": _file,
    "run": _in_its_place,
    "text": None,
}


def _begin(namespace: dict[str, Any]) -> None:
    outside: contextlib.ExitStack = namespace[_OUTSIDE]
    sys.modules[namespace["__name__"]] = namespace[_PAGE]
    outside.callback(sys.modules.pop, namespace["__name__"])
    outside.enter_context(torch.random.fork_rng(devices=[]))
    folder = outside.enter_context(tempfile.TemporaryDirectory())
    outside.callback(os.chdir, os.getcwd())
    os.chdir(folder)
    outside.callback(setattr, sys, "executable", sys.executable)
    sys.executable = executable()
    torch.manual_seed(0)
    if accelerate := sys.modules.get("accelerate.state"):
        # Accelerate keeps its precision in the process, and refuses another one: a page starts as a new process does.
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)


def _end(namespace: dict[str, Any]) -> None:
    castwise.uninstall()
    namespace[_OUTSIDE].close()


pytest_collect_file = Sybil(
    parsers=[_blocks],
    patterns=["README.md", "CONTRIBUTING.md", "docs/**/*.md", "docs/*.md"],
    excludes=["docs/writing.md", "benchmarks/README.md"],
    path=str(ROOT),
    setup=_begin,
    teardown=_end,
).pytest()
