"""The command line: exit code 2 and one line, whatever is asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.damage import a_share, attempt, mangled, soon
from torch import nn
from typer.testing import CliRunner, Result

import castwise
from castwise._cli import app
from castwise._cli import run_command as run
from castwise._cli.policy_options import read_schedule
from castwise._demo import command
from castwise._demo.gpt import EMULATED
from castwise._demo.training import Result as TrainingResult
from castwise._demo.training import Training
from castwise._doctor.checkup import Checkup
from castwise._user_error import UserError

OPTIONS = {
    "compare": ["--model", "--policy", "--reference", "--no-gradients", "--vary", "--report", "--json"],
    "demo": ["--data", "--steps", "--device", "--weights", "--out", "--json"],
    "doctor": ["--json"],
    "report": ["--output", "-o", "--text"],
    "run": ["-m", "--out", "--every", "--policy", "--schedule", "--weight-cache", "--"],
    "trace": ["--model", "--input", "--policy", "--weight-cache", "--json"],
    "tune": ["--model", "--format", "--tolerance", "--cost", "-o", "--report", "--json"],
}
WORDS = [
    *("", ".", "..", "--help", "--version", "-h", "-1", "0", "1", "10", "1e3", "nan", "9" * 30),
    *("tiny", "cpu", "cuda", "xpu", "ddp", "bf16", "fp16", "bf15", "policy.toml", "policy.json", "folder"),
    *("script.py", "broken.py", "monitor.jsonl", "no.jsonl", "json", "Headroom", "Dynamic(init_scale=1024.0)"),
    *("Dynamic(1e999)", "Dynamic(", "Guard(1)", "Static(-1)", "exit()", "(" * 300),
    *(
        "castwise._demo.gpt:example",
        "script.py:f",
        "os:getcwd",
        "torch.nn:Linear",
        "a:b",
        ":",
        "..:x",
        "os:path",
        "castwise:x.y",
    ),
    *("2x4", "2x4:int64", "2x4:bfloat16", "2x4:load", "0x0", "-1x2", "x", "99999999x99999999", "1" * 400),
    *("2x2:float8_e4m3fn", "2x2:quint8"),
]
RESULT = TrainingResult(Training("fp16", "castwise", EMULATED, 1), 1.0, 1.0, None, 18.0, 0, [1.0], {})
NAMES = st.text(st.characters(exclude_characters="\x00/", exclude_categories=["Cs", "Cc"]), max_size=6)
TOKENS = st.sampled_from(WORDS) | NAMES


@pytest.fixture(scope="module", autouse=True)
def _in_a_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Some files of each kind; what takes seconds is left out: what a command does when all is well has other tests."""
    folder = tmp_path_factory.mktemp("here")
    castwise.policies.bf16.to_file(folder / "policy.toml")
    (folder / "policy.json").write_text('{"compute": "bf"}')
    (folder / "folder").mkdir()
    (folder / "script.py").write_text("print()")
    (folder / "broken.py").write_text("print(")
    (folder / "monitor.jsonl").write_text('{"kind": "run", "format": 1, "settings": {}}\n')
    (folder / "no.jsonl").write_bytes(b"\xff\n\n")
    checkup = Checkup(torch="0", python="0", platform="0", devices=[], notes=[])
    seen = castwise.trace(nn.Linear(1, 1), torch.ones(1, 1), policy=castwise.policies.bf16)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setattr(command, "Trainer", MagicMock())
        patch.setattr(command, "train", lambda *_: RESULT)
        patch.setattr(command, "_report", lambda _: "")
        patch.setattr(command, "read_text", lambda _: bytes(range(256)) * 40)
        patch.setattr("castwise._doctor.checkup.examine", lambda _: checkup)
        patch.setattr("castwise.report._html_report.load_plotly", lambda: "")
        patch.setattr(castwise, "trace", lambda *_, **__: seen)
        patch.setattr("castwise._demo.gpt.task", task)
        yield


def task() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]], nn.Module]:
    """A small one for `compare` and `tune` without `--model`."""
    return nn.Linear(2, 1), [(torch.ones(2, 2), torch.ones(2, 1))], nn.MSELoss()


def invoke(arguments: list[str]) -> Result:
    with soon():
        done = CliRunner().invoke(app, arguments, prog_name="castwise")
    run.chosen.clear()  # what `castwise run` would do now is the script's
    return done


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "doctor"])
@given(data=st.data())
@a_share(10)
def test_arguments_are_understood_or_refused_in_a_line(name: str, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.sampled_from(OPTIONS[name]) | TOKENS, max_size=5))
    done = invoke([name, *tokens])
    assert done.exception is None or isinstance(done.exception, SystemExit), (name, tokens, done.exception)
    assert done.exit_code in (0, 2), (name, tokens, done.output)
    assert "Traceback" not in done.output
    if done.exit_code == 2:
        assert done.stderr.startswith(f"castwise {name}: ")
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1, done.stderr


@given(tokens=st.lists(st.sampled_from([*OPTIONS, "doctor", "--json"]) | TOKENS, max_size=3))
@a_share(20)
def test_commands_are_understood_or_refused(tokens: list[str]) -> None:
    done = invoke(tokens)
    assert done.exception is None or isinstance(done.exception, SystemExit), (tokens, done.exception)
    assert done.exit_code in (0, 2)


SPELLED = ["Headroom", "Dynamic(1024.0, hysteresis=2)", "Static(init_scale=-2.0 + 1j)", "Guard(patience=[{1: (2,)}])"]


@given(data=st.data())
@a_share(2)
def test_schedules_are_understood_or_refused_in_a_line(data: st.DataObject) -> None:
    spelled = data.draw(st.sampled_from(SPELLED)).encode()
    spelled = data.draw(st.just(spelled) | mangled(spelled))
    many = data.draw(st.sampled_from([b"", b"-", b"(", b"1+", b"[", b"not ", b"f(", b"lambda:"]))
    text = spelled.replace(b"1", many * data.draw(st.sampled_from([1, 90, 5000])) + b"1").decode(errors="replace")
    _, refusal = attempt(lambda: read_schedule(text), UserError)
    assert refusal is None or refusal.startswith("--schedule")


def test_a_schedule_that_python_cannot_parse_for_its_depth_is_refused() -> None:
    for text in ("Static(" + "-" * 20_000 + "1)", "Static(" + "[" * 5000 + "1" + "]" * 5000 + ")"):
        with pytest.raises(UserError, match=r"^--schedule"):
            read_schedule(text)
