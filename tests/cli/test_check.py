"""`castwise check`: its exit codes, files and texts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess

import pytest
from typer.testing import CliRunner

from castwise import __main__ as program
from castwise._cli import app, check_command, run_command
from castwise._cli.script import Ending, Script

SCRIPT = """
import sys
import torch

print("noise of the script")
eps, module = float(sys.argv[1]) if len(sys.argv) > 1 else 1e-5, sys.modules["__main__"]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8, eps), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(6, 3, 4)

def loss_of(x):
    return module.model(x).square().mean()

for x in data:
    optimizer.zero_grad()
    loss_of(x).backward()
    optimizer.step()
"""


def castwise(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["check", *words], prog_name="castwise")
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    (folder / "train.py").write_text(SCRIPT)
    code, out, _ = castwise("record", f"{folder / 'train.py'}", "--steps", "2", "--out", f"{folder / 'golden.cwcheck'}")
    assert (code, out.partition(":")[0]) == (0, "recorded 2 steps in float32")
    return folder


@pytest.fixture
def words(recorded: Path) -> tuple[str, ...]:
    return str(recorded / "train.py"), "--against", str(recorded / "golden.cwcheck")


def test_an_unchanged_script_exits_with_0(words: tuple[str, ...]) -> None:
    assert castwise(*words) == (0, "identical: all losses, gradients, weights and buffers have the same bits\n", "")


def test_another_function_exits_with_1_and_is_named(words: tuple[str, ...]) -> None:
    code, out, _ = castwise(*words, "--json", "--", "1e-4")
    found = json.loads(out)
    assert (code, found["exit_code"], found["kind"], found["where"]) == (1, 1, "different", "1, forward")


def test_a_script_that_fails_exits_with_125_and_its_traceback(words: tuple[str, ...]) -> None:
    code, out, err = castwise(*words, "--", "nothing")
    assert (code, out) == (125, "")
    assert err.startswith(
        f'castwise check: {words[0]} failed:\nTraceback (most recent call last):\n  File "{words[0]}"'
    )
    assert "ValueError: could not convert string to float: 'nothing'" in err


def test_a_script_of_ranks_is_told_how_to_get_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch.distributed\ntorch.distributed.init_process_group('gloo')\n")
    code, _, err = castwise("record", str(script), "--out", str(tmp_path / "golden.cwcheck"))
    assert code == 125
    assert err.endswith("for a script of ranks, give their number: castwise check record --ranks N SCRIPT\n")


def test_a_script_that_fails_only_in_float64_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "loss = model(torch.ones(1, 1)).sum()\n"
        "assert loss.dtype is torch.float32\n"
        "loss.backward()\n"
        "optimizer.step()\n"
    )
    code, _, err = castwise("record", str(script), "--steps", "1", "--out", str(tmp_path / "golden.cwcheck"))
    assert code == 125
    assert err.startswith(
        f"castwise check: {script} failed:\nit runs as it is, but not in float64, in which a recording "
    )
    assert "AssertionError" in err


def test_files_that_are_not_there_exit_with_125(recorded: Path, words: tuple[str, ...]) -> None:
    code, _, err = castwise(str(recorded / "no.py"), *words[1:])
    assert (code, err.count("\n")) == (125, 1)
    path = recorded / "no.cwcheck"
    code, _, err = castwise(words[0], "--against", str(path))
    text = f"castwise check: there is no {path}: write it with `castwise check record SCRIPT --out {path}`\n"
    assert (code, err) == (125, text)


def test_a_file_that_is_no_golden_file_is_refused_before_the_script_runs(words: tuple[str, ...]) -> None:
    code, _, err = castwise("record", words[0], "--out", words[0], "--", "nothing")
    assert (code, err.partition(";")[0]) == (
        125,
        f"castwise check: cannot write {words[0]}: it exists and is not a golden file that castwise has written",
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "missing argument 'SCRIPT' (see `castwise check --help`)"),
        ("record", "give a script to record, as in `castwise check record train.py`"),
        ("record x.py --against g", "--against is for checking; `record` writes to --out"),
        ("x.py --steps 2", "--steps is for `castwise check record`; the golden file has the steps"),
        ("record x.py --steps 0", "--steps must be at least 1, got 0"),
        ("x.py --out g", "--out is for `castwise check record`; the golden file to compare with is --against"),
        (
            "x.py --width 1",
            "no such option: --width (see `castwise check --help`; the script's own options follow `--`)",
        ),
        ("x.py --ranks 2", "--ranks is for `castwise check record`; the golden file has the ranks"),
        ("record x.py --ranks 0", "--ranks must be at least 1, got 0"),
        ("x.py --ops . --steps 0", "--steps must be at least 1, got 0"),
        ("record x.py --ops .", "--ops is for checking; leave out `record`"),
        (
            "x.py --ops . --against g",
            "--ops compares two versions of the script without a golden file; leave out --against and --bisect",
        ),
    ],
)
def test_a_wrong_command_line_exits_with_125_because_git_bisect_reads_2_as_bad(line: str, said: str) -> None:
    assert castwise(*line.split()) == (125, "", f"castwise check: {said}\n")


def test_strings_have_the_same_hashes_in_each_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an unchanged script whose data depend on the order of a set would be called different."""
    started: list[tuple[list[str], str]] = []
    monkeypatch.setattr(os, "execve", lambda file, words, env: started.append((words[1:], env["PYTHONHASHSEED"])))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "castwise", "check", "--help"])
    monkeypatch.setattr(sys, "argv", ["castwise", "check", "--help"])
    monkeypatch.setenv("PYTHONHASHSEED", "7")  # the user's own
    for _ in range(2):
        with pytest.raises(SystemExit):
            program.main()
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert started == [(["-m", "castwise", "check", "--help"], "0")]


def test_an_error_of_castwise_exits_with_125_and_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_command, "_run", lambda *_: 1 / 0)
    code, out, err = castwise("train.py")
    assert (code, out, err.splitlines()[-1]) == (125, "", "ZeroDivisionError: division by zero")


def test_accept_prints_what_changed_and_records_it(words: tuple[str, ...], tmp_path: Path) -> None:
    golden = tmp_path / "golden.cwcheck"
    golden.write_bytes(Path(words[2]).read_bytes())
    code, out, _ = castwise("accept", words[0], "--against", str(golden), "--", "1e-4")
    assert (code, out.partition("\n")[0]) == (0, "different function: 1, forward, step 1")
    assert castwise(words[0], "--against", str(golden), "--", "1e-4")[0] == 0


def test_a_run_is_preceded_by_a_check_or_by_a_recording(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []

    def run(command: list[str], *, stdin: int, stdout: int, text: bool) -> CompletedProcess[str]:
        assert (stdin, stdout, text) == (DEVNULL, PIPE, True)  # the run reads standard input
        started.append(command)
        return CompletedProcess(command, 1, "different function: loss, step 1\n  more\n")

    monkeypatch.setattr(run_command.subprocess, "run", run)
    endings: list[Ending] = []
    monkeypatch.setattr(Script, "run", lambda self, *options: endings.append(options[-1]))
    for name in ("golden.cwcheck", "new.cwcheck"):
        words = ["run", "--check", str(recorded / name), str(recorded / "train.py"), "1e-4"]
        assert CliRunner().invoke(app, words).exit_code == 0
        run_command.chosen.pop()()
    assert [ending.check for ending in endings] == ["different function: loss, step 1"] * 2
    first, second = started
    assert first[:4] == [sys.executable, "-m", "castwise", "check"]
    code, out, _ = castwise(*first[4:])
    assert (code, out.partition("\n")[0]) == (1, "different function: 1, forward, step 1")
    assert second[4:] == ["record", words[3], "--out", words[2], "--", "1e-4"]
    refused = {"--weight-cache": "leave out --policy, --schedule and --weight-cache", "--guard": "starts the ranks"}
    monkeypatch.setenv("WORLD_SIZE", "2")
    for option, said in refused.items():
        found = CliRunner().invoke(app, ["run", option, *words[1:]])
        assert (found.exit_code, len(started)) == (2, 2)
        assert said in found.stderr


def test_ops_are_compared_with_those_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, other in (("here", "relu"), ("there", "exp")):
        (tmp_path / folder / "runs").mkdir(parents=True)
        (tmp_path / folder / "runs" / "train.py").write_text("import torch, part\n" + SCRIPT.replace(".square", ".abs"))
        part = f"import torch, rest\ntorch.Tensor.abs = getattr(torch.Tensor, {other[:2]!r} + rest.NAME)\n"
        (tmp_path / folder / "runs" / "part.py").write_text(part)
        (tmp_path / folder / "lib").mkdir()
        (tmp_path / folder / "lib" / "rest.py").write_text(f"NAME = {other[2:]!r}\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", "lib")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "here" / "lib")])  # as Python does
    words = ("runs/train.py", "--ops", "../there", "--steps", "1")
    code, out, err = castwise(*words)
    assert (code, err) == (0, "")
    line = 1 + (tmp_path / "here" / "runs" / "train.py").read_text().splitlines().index(
        "    return module.model(x).abs().mean()"
    )
    assert out.splitlines()[1] == (
        f"  outside modules, forward (runs/train.py:{line}): exp float32 replaced by relu float32"
    )
    code, out, _ = castwise(*words, "--json")
    found = json.loads(out)["differences"][0]
    assert (code, found["phase"], found["modules"], found["rounds_more"]) == (0, "forward", [], False)
    code, _, err = castwise("part.py", "--ops", "../there/runs")
    assert (code, err) == (
        125,
        "castwise check: cannot read part.py: No such file or directory; give the path of a "
        "script, or -m and the name of a module\n",
    )
    (tmp_path / "here" / "train.py").write_text("")
    assert castwise("train.py", "--ops", "../there")[::2] == (125, "castwise check: there is no train.py in ../there\n")
