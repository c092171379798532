"""The command line and the demo's folders: exit code 2 and one line, whatever is asked of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.damage import JSON, a_share, attempt, changed, mangled, soon
from torch import nn
from typer.testing import CliRunner, Result

import castwise
from castwise._user_error import UserError
from castwise.cli import app, run
from castwise.cli.policies import read_schedule
from castwise.demo import checkpoint, command
from castwise.demo.checkpoint import Checkpoint
from castwise.demo.comparison import _results
from castwise.demo.run_folder import CHECKPOINT, SETTINGS, MetricsFile, create_run_folder, read_settings
from castwise.demo.settings import Settings
from castwise.doctor.checkup import Checkup

OPTIONS = {
    "compare": ["--model", "--policy", "--reference", "--no-gradients", "--vary", "--report", "--json"],
    "demo": [
        *("--data", "--preset", "--steps", "--device", "--seed"),
        *("--strategy", "--out", "--checkpoint-every", "--resume"),
    ],
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
        "castwise.demo.gpt:example",
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
        patch.setattr(command, "_run", lambda *_: True)
        patch.setattr(command, "read_text", lambda _: bytes(range(256)) * 40)
        patch.setattr("castwise.doctor.checkup.examine", lambda _: checkup)
        patch.setattr("castwise.report.report._plotly_js", lambda: "")
        patch.setattr(castwise, "trace", lambda *_, **__: seen)
        yield


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


SETTINGS_HELD = {
    "data": None,
    "preset": "tiny",
    "steps": 5,
    "device": "cpu",
    "checkpoint_every": 2,
    "seed": 0,
    "threads": 1,
    "emulated": ["fp16"],
    "strategy": None,
    "processes": 1,
    "text_digest": "0" * 64,
    "weights": "fp32",
}


@given(held=changed(SETTINGS_HELD) | JSON)
@a_share(10)
def test_settings_of_a_run_are_settings_or_refused(held: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / SETTINGS).write_text(json.dumps(held))
    settings, refusal = attempt(lambda: Settings.from_json(read_settings(folder), str(folder / SETTINGS)), UserError)
    assert refusal is None or "\n" not in refusal
    if refusal is None:
        assert len(settings.runs()) == 6
        done = invoke(["demo", "--resume", str(folder)])
        assert done.exit_code in (0, 2), (held, done.exception)


RESULT = {
    "precision": "fp32",
    "library": "torch.amp",
    "steps": 5,
    "loss": 1.5,
    "step_ms": 2.5,
    "tokens_per_s": 9.5,
    "peak_bytes": None,
    "skipped": 0,
    "weights_sha256": "0",
    "weights": "fp32",
    "losses_sha256": "0",
    "stored_bytes": 18.0,
}


@given(
    held=changed({"results": [RESULT], "trainer": {"model": {"w": 1}, "skipped": 0}, "metrics_bytes": 4}) | JSON,
    metrics=st.binary(max_size=8),
)
@a_share(16)
def test_checkpoints_with_a_right_hash_are_whole_or_refused(
    held: Any, metrics: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path, lines = folder / CHECKPOINT, folder / "metrics.jsonl"
    lines.write_bytes(metrics)
    checkpoint.write_atomically(
        path, lambda file: (torch.save(held, file), file.write(checkpoint._seal(file, file.tell())))
    )
    loaded, refusal = attempt(lambda: checkpoint.load(path), UserError)
    if refusal is None:
        attempt(lambda: _results(loaded, Settings(**SETTINGS_HELD), path), UserError)  # type: ignore[arg-type]
        file, refusal = attempt(lambda: MetricsFile(lines, loaded.metrics_bytes), UserError)
        assert lines.read_bytes() == metrics[: loaded.metrics_bytes if refusal is None else len(metrics)]
        if refusal is None:
            file.close()


@given(data=st.data())
@a_share(16)
def test_damaged_checkpoints_are_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    checkpoint.save(path, Checkpoint([RESULT], {"model": {"w": torch.ones(2)}}, 4))
    content = path.read_bytes()
    damaged = data.draw(mangled(content))
    path.write_bytes(damaged)
    _, refusal = attempt(lambda: checkpoint.load(path), UserError)
    assert (refusal is None) == (damaged == content)


@given(name=NAMES)
@a_share(50)
def test_a_run_whose_folder_cannot_be_made_leaves_nothing(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("out")
    (folder / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        create_run_folder(folder / "file" / name, {})
    assert [path.name for path in folder.iterdir()] == ["file"]
