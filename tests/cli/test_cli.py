"""The command line as a whole: what it loads, completes and says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.forked import Python
from tests.monitor import recorded
from typer.testing import CliRunner

import castwise
from castwise import policies, schedules
from castwise._cli import app
from castwise._cli import completion as names
from castwise._demo.command import WEIGHTS
from castwise.monitor._record_file import FILE_NAME

GROUP: Any = typer.main.get_command(app)


# Answers each line in a child of one process, which has imported the command line, and prints whether torch was needed.
LIGHT = """
import contextlib, json, os, sys
import castwise._cli
from castwise.__main__ import main
with contextlib.suppress(ImportError):
    import typer._adapters  # which loads pydantic as soon as an option is read

for words, environment in json.load(sys.stdin):
    if os.fork():
        os.wait()
        continue
    sys.argv = ["castwise", *words]
    os.environ.update(environment)
    try:
        main()
    except SystemExit as exit_:
        print(f"\\n{exit_.code} {'torch' in sys.modules}", flush=True)
    os._exit(0)
"""


def light(*lines: tuple[list[str], dict[str, str]], folder: Path | None = None) -> list[tuple[str, str]]:
    """What each line prints, in an environment; and its exit code, and whether torch was imported."""
    run = subprocess.run(
        [sys.executable, "-c", LIGHT], input=json.dumps(lines), capture_output=True, text=True, cwd=folder, check=True
    )
    answers = re.findall(r"(.*?)^(\d (?:True|False))\n", run.stdout, re.M | re.S)
    assert len(answers) == len(lines), run.stderr
    return answers


def test_what_needs_no_torch_answers_without_it() -> None:
    lines = {
        "": 0,
        "--version": 0,
        "--help": 0,
        **{f"{name} --help": 0 for name in GROUP.commands},
        "--wrong": 2,
        "run missing.py": 2,
        "run python train.py": 2,
        "run --wrong train.py": 2,
        "run -m no_such_module": 2,
        "run torchrun train.py": 2,
        "report missing": 2,
        "fix missing": 2,
        "fix --force": 2,
        "compare --reference float46": 2,
        "tune --cost money": 2,
        "tune --report missing/page.html": 2,
        "tune --tolerance -1": 2,
        "compare --model missing.py:f": 2,
        "trace --policy missing": 2,
        "diagnose missing --model test_cli.py:f": 2,
        "run --policy missing.toml test_cli.py": 2,
        "run --schedule Headrom test_cli.py": 2,
    }
    narrow = {"COLUMNS": "80"}
    answers = dict(
        zip(lines, light(*((line.split(), narrow) for line in lines), folder=Path(__file__).parent), strict=True)
    )
    assert {line: end for line, (_, end) in answers.items()} == {line: f"{code} False" for line, code in lines.items()}
    flags_with_a_value = [
        line for line, (printed, _) in answers.items() if line.endswith("--help") and "bool" in printed
    ]
    assert flags_with_a_value == []
    picture = GROUP.commands["run"].epilog.partition("```text\n")[2].partition("```")[0].splitlines()
    assert [line for line in picture if line.strip() not in answers["run --help"][0]] == []


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
    assert {"typer", "rich", "castwise._cli"}.isdisjoint(loaded)


def test_help_imports_no_torch() -> None:
    loaded = modules_loaded_by("run", "--help")
    assert "castwise._cli" in loaded
    assert "torch" not in loaded


def test_completion_imports_no_torch() -> None:
    loaded = modules_loaded_by(**typed("castwise trace --policy bf16_"))
    assert "castwise._cli" in loaded
    assert "torch" not in loaded


@pytest.mark.parametrize("form", ["", "--text", "--json"])
def test_a_report_needs_no_torch(form: str, tmp_path: Path) -> None:
    run = recorded.troubled(tmp_path / "run", steps=200, layers=1)
    loaded = modules_loaded_by("report", str(run), *form.split())
    assert "castwise.monitor._records" in loaded
    assert "torch" not in loaded


def test_the_test_of_torch_can_fail(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import subprocess\nprint('ran')")
    assert "torch" in modules_loaded_by("run", "--out", str(tmp_path / "out"), str(tmp_path / "script.py"))


def test_values_complete(tmp_path: Path) -> None:
    words = {
        "castwise demo --device c": ["cpu", "cuda"],
        "castwise demo --weights b": ["bf16-split"],
        "castwise run --schedule H": ["Headroom"],
        "castwise run --policy fp16_": ["fp16_stable"],
        "castwise trace --policy m": ["mine.toml"],
        "castwise compare --vary batch_s": ["batch_size"],
        "castwise tune --format bf": ["bfloat16"],
    }
    (tmp_path / "mine.toml").touch()
    answers = light(*(([], typed(line)) for line in words), folder=tmp_path)
    assert {line: printed.split() for line, (printed, _) in zip(words, answers, strict=True)} == words


def is_schedule(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, schedules.Schedule) and value is not schedules.Schedule


def test_names_on_the_command_line_are_those_of_the_library() -> None:
    assert policies.__all__ == list(names.POLICIES)
    assert FILE_NAME == names.RECORDS
    assert [name for name in schedules.__all__ if is_schedule(getattr(schedules, name))] == list(names.SCHEDULES)
    assert WEIGHTS == names.WEIGHTS


@pytest.mark.parametrize("name", GROUP.commands)
def test_each_command_has_an_example_that_it_understands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("capsule-7.safetensors").touch()
    command = GROUP.commands[name]
    program, called, *arguments = shlex.split(
        command.epilog.splitlines()[0].removeprefix("Example: ").strip("`").partition(" > ")[0]
    )
    assert (program, called) == ("castwise", name)
    command.make_context(name, arguments)


@pytest.mark.parametrize("name", GROUP.commands)
def test_help_begins_with_one_sentence(name: str) -> None:
    first = GROUP.commands[name].help.split("\n\n")[0]
    assert first.endswith(".")
    assert ". " not in first
    assert len(first) < 120


@pytest.mark.parametrize("name", GROUP.commands)
def test_every_value_shows_its_default(name: str) -> None:
    command = GROUP.commands[name]
    context = command.make_context(name, [], resilient_parsing=True)
    options = [param for param in command.params if param.param_type_name == "option" and not param.is_flag]
    options = [option for option in options if not option.required]
    texts = {param.name: param.get_help_record(context)[1] for param in options}
    assert [option for option, text in texts.items() if "[default: " not in text] == []


@pytest.mark.parametrize("name", GROUP.commands)
def test_every_command_prints_json(name: str) -> None:
    assert "--json" in {spelling for param in GROUP.commands[name].params for spelling in param.opts}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--nope", "castwise: no such option: --nope"),
        ("bnch", "castwise: no such command 'bnch'"),
        ("trace --polcy x", "castwise trace: no such option: --polcy"),
        ("tune --model", "castwise tune: option '--model' requires an argument"),
        ("tune --tolerance x", "castwise tune: invalid value for '--tolerance'"),
        ("doctor extra", "castwise doctor: got unexpected extra argument"),
        ("run --every 0 x.py", "castwise run: --every must be at least 1, got 0"),
    ],
)
def test_a_wrong_line_is_one_line_of_error(line: str, said: str) -> None:
    result = CliRunner().invoke(app, line.split(), prog_name="castwise")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(said)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", ["--help", "run --help", "report RUN --text", "trace"])
def test_a_pipe_gets_no_colours(arguments: str, tmp_path: Path) -> None:
    run = recorded.troubled(tmp_path / "run", steps=50, layers=1)
    words = [str(run) if word == "RUN" else word for word in arguments.split()]
    printed = "".join(Python(["-m", "castwise", *words], together=True).communicate())
    assert "\x1b" not in printed
    assert len(printed) > 100


def test_a_pipe_gets_colours_only_if_they_are_forced() -> None:
    assert "\x1b" not in run_python("-m", "castwise", "--help", GITHUB_ACTIONS="1")
    assert "\x1b" in run_python("-m", "castwise", "--help", GITHUB_ACTIONS="1", FORCE_COLOR="1")


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
def test_a_terminal_gets_colours() -> None:
    import pty

    ours, theirs = pty.openpty()
    subprocess.run(
        [sys.executable, "-m", "castwise", "--help"], stdout=theirs, check=True, env=os.environ | {"TERM": "xterm"}
    )
    assert b"\x1b[" in os.read(ours, 10_000)
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("diagnose missing", "diagnose: there is no file missing: castwise run writes capsule-N.safetensors into "),
        ("fix --force", "fix: --force says what --apply may write: give --apply as well"),
    ],
)
def test_the_first_thing_to_mend_is_what_is_said(line: str, message: str) -> None:
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"castwise {message}")


def test_exit_codes_have_a_row_for_each_command() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "command_line.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page, re.M)
    assert rows == list(GROUP.list_commands(None))


METAVARS = {
    *("SCRIPT", "ARGS", "RUN", "CAPSULE", "N", "FILE", "FOLDER", "FILE|FOLDER", "NAME", "NAME|FILE", "SCHEDULE"),
    *(
        "MODULE|FILE:FACTORY",
        "MODULE|FILE:FUNCTION",
        "SHAPE[:DTYPE]",
        "[cpu|cuda]",
        "[fp32|bf16-split]",
        "[first|diagnose|nothing]",
        "INVARIANT[=PATTERN]",
        "GOOD..BAD",
        "FOLDER|COMMIT",
    ),
}


@pytest.mark.parametrize("name", GROUP.commands)
def test_every_value_is_named_in_one_style(name: str) -> None:
    params = GROUP.commands[name].params
    assert {param.metavar for param in params if not getattr(param, "is_flag", False)} <= METAVARS
