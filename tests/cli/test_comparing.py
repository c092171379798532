"""`castwise compare` and `castwise tune`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from castwise import Policy
from castwise._cli import app
from castwise._cli import completion as names
from castwise._recipes.recipe import RECIPES
from castwise.comparison import _precision_drift as precision_drift
from castwise.tuning import _costs as costs
from castwise.tuning import _precision_search as precision_search

FACTORY = """
import torch
def task(bias=0.0, count=4):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    model[2].bias.data.add_(bias)
    batches = [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(count)]
    return model, batches, torch.nn.functional.cross_entropy
def broken():
    return task(float("nan"))
def single():
    return task(count=1)
def empty():
    return task(count=0)
def inputs():
    return task()[0], [torch.ones(8, 8)], torch.nn.functional.cross_entropy
def model():
    return task()[0]
def no_model():
    return 1, 2, 3
def no_loss():
    return (*task()[:2], 3)
def norms():
    class Norm(torch.nn.Module):
        def forward(self, x):
            return x.square()
    return Norm(), [(torch.tensor(3.0), None), (torch.tensor(4.0), None)], lambda outputs, targets: outputs.mean()
def refusing():
    def loss(outputs, targets):
        raise ValueError("the model's own")
    return (*task()[:2], loss)
def interrupted():
    def loss(outputs, targets):
        raise KeyboardInterrupt
    return (*task()[:2], loss)
"""
TASK = ("--model", "task_of_test.py:task")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "task_of_test.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_policies_by_name_and_file_are_compared(here: Path) -> None:
    Policy(compute="bfloat16", modules={"2": "float32"}).to_file(here / "mine.toml")
    policies = ("--policy", "bf16", "--policy", "mine.toml")
    code, printed, _ = run("compare", *TASK, *policies, "--vary", "batch_size", "--reference", "float64")
    assert code == 0
    for text in ("bf16: modules by effect on the loss", "mine: modules", "gradient cosine", "batch_size", "GELU"):
        assert text in printed
    code, printed, _ = run("compare", *TASK, *policies, "--json", "--no-gradients")
    assert code == 0
    found = json.loads(printed)
    assert found["policies"]["mine"]["policy"]["modules"] == {"2": "float32"}
    assert found["policies"]["bf16"]["summary"]["gradient_cosine"] is None


def test_a_policy_may_be_the_reference_and_a_page_is_written(here: Path) -> None:
    code, printed, errors = run("compare", *TASK, "--reference", "bf16_stable", "--report", "page.html")
    assert code == 0
    assert errors == "wrote page.html\n"
    assert (here / "page.html").stat().st_size > 4e5
    assert not list(here.glob("*.js"))
    assert "bf16" in printed


def test_a_policy_is_tuned_and_written(here: Path) -> None:
    formats = ("--format", "bfloat16", "--format", "float32")
    code, printed, errors = run(
        *("tune", *TASK, *formats, "--tolerance", "0.5", "-o", "best.toml", "--report", "page.html", "--shared-script")
    )
    assert code == 0
    assert printed.startswith("bfloat16: 0.500 of the flops of float32")
    assert Policy.from_file(here / "best.toml") == Policy(compute="bfloat16")
    assert errors == "wrote best.toml\nwrote page.html\n"
    assert (here / "page.html").stat().st_size < 1e5
    assert len(list(here.glob("castwise-plotly-*.js"))) == 1
    code, printed, _ = run("tune", *TASK, *formats, "--cost", "bytes", "--json")
    assert code == 0
    assert json.loads(printed)["cost_kind"] == "bytes"


def test_a_tolerance_out_of_reach_is_exit_code_1() -> None:
    code, printed, _ = run("tune", *TASK, "--format", "bfloat16", "--tolerance", "1e-9")
    assert code == 1
    assert "none of the policies that were run is within the tolerance" in printed


@pytest.mark.parametrize("command", ["compare", "tune"])
def test_a_reference_that_is_not_finite_is_diagnosed_with_exit_code_1(command: str) -> None:
    code, printed, errors = run(command, "--model", "task_of_test.py:broken")
    assert code == 1
    assert printed == ""
    assert "is nan in the reference" in errors
    assert "2.bias is nan" in errors


@pytest.mark.parametrize("command", ["compare", "tune"])
def test_ctrl_c_is_exit_code_130(command: str) -> None:
    code, _, errors = run(command, "--model", "task_of_test.py:interrupted")
    assert code == 130
    assert errors == f"castwise {command}: stopped\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["compare", "--model", "task_of_test.py:model"],
            "must return a model, a list of (inputs, targets), and a loss",
        ),
        (["compare", "--model", "task_of_test.py:no_model"], "returned int, not a torch.nn.Module"),
        (["compare", "--model", "task_of_test.py:no_loss"], "returned int, not a function of outputs and targets"),
        (["compare", "--model", "task_of_test.py:inputs"], "batches[0] must be (inputs, targets), got Tensor"),
        (["compare", "--model", "task_of_test.py:empty"], "batches must have at least one batch, got none"),
        (["compare", "--model", "nothing"], "--model must be MODULE:FACTORY or FILE:FACTORY"),
        (["compare", *TASK, "--policy", "bf61"], "did you mean 'bf16'"),
        (["compare", *TASK, "--reference", "fp32"], "--reference must be one of 'float32', 'float64', 'bf16'"),
        (["compare", "--model", "task_of_test.py:norms", "--vary", "batch_size"], ": --vary needs batches of samples"),
        (["tune", "--model", "task_of_test.py:norms"], "no module that was called has any flops to save"),
        (["tune", *TASK, "-o", "no/policy.toml"], "cannot write no/policy.toml"),
        (["tune", *TASK, "--report", "no/page.html"], "cannot write no/page.html"),
        (
            ["compare", *TASK, "--vary", "batch"],
            ": --vary must be one of 'batch_size', 'batch_order', got 'batch'; did you mean 'batch_size'",
        ),
        (["compare", *TASK, "--report", "no/page.html"], "cannot write no/page.html"),
        (["tune", "--model", "task_of_test.py:single"], "two batches because every second one is held out, got one"),
        (["tune", *TASK, "--format", "float8"], ": --format must be one of 'float16', 'bfloat16', 'float32', "),
        (
            ["tune", *TASK, "--cost", "flop"],
            ": --cost must be one of 'flops', 'bytes', 'measured', got 'flop'; did you mean",
        ),
        (["tune", *TASK, "--tolerance", "-1"], ": --tolerance must be a finite number > 0, got -1.0"),
        (["tune", *TASK, "--format", "float32"], ": --format must include one other than 'float32'"),
        (["compare", "--model", "nope:task"], "there is no module 'nope': check its name, or give FILE:FACTORY"),
        (["compare", "--model", "castwise._demo.gpt:nope"], "; its functions are 'example', 'task'"),
        (["tune", *TASK, "-o", "policy.yaml"], "--output must end in .toml or .json, got 'policy.yaml'"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(arguments: list[str], text: str) -> None:
    code, _, errors = run(*arguments)
    assert code == 2
    assert text in errors
    assert errors.startswith(f"castwise {arguments[0]}: ")
    assert errors.count("\n") == 1


def test_a_policy_that_does_not_fit_the_model_is_named(here: Path) -> None:
    Policy(compute="bfloat16", modules={"blocks": "float32"}).to_file(here / "other.toml")
    code, _, errors = run("compare", *TASK, "--policy", "other.toml")
    assert code == 2
    assert "other" in errors
    assert "matches no module of the model" in errors


def test_names_on_the_command_line_are_those_of_the_library() -> None:
    assert names.FORMATS == precision_search.FORMATS
    assert names.COSTS == costs.COSTS
    assert list(names.REFERENCES) == list(precision_drift._REFERENCES)
    assert names.VARIATIONS == precision_drift._VARY


@pytest.mark.parametrize("command", ["compare", "tune"])
def test_where_nothing_can_be_written_is_found_before_the_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def drift(*args: object) -> None:
        raise AssertionError("the run has begun")

    monkeypatch.setattr(precision_drift.Comparison, "drift", drift)
    code, _, errors = run(command, *TASK, "--report", "no/page.html")
    assert code == 2
    assert "cannot write no/page.html: there is no folder no; create it first" in errors


@pytest.mark.parametrize("command", ["compare", "tune"])
def test_an_error_of_the_model_has_a_traceback_that_begins_in_the_model(command: str) -> None:
    code, printed, errors = run(command, "--model", "task_of_test.py:refusing")
    assert (code, printed) == (1, "")
    lines = errors.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith('  File "task_of_test.py", line ')
    assert lines[1].endswith(", in loss")
    assert lines[-1] == "ValueError: the model's own"


def test_an_error_of_castwise_itself_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def drift(*args: object) -> None:
        raise KeyError("castwise")

    monkeypatch.setattr(precision_drift.Comparison, "drift", drift)
    monkeypatch.setattr("castwise._cli.model_errors.is_ours", lambda frame: True)
    result = CliRunner().invoke(app, ["compare", *TASK])
    assert isinstance(result.exception, KeyError)


def test_files_of_one_stem_keep_their_results_apart(here: Path) -> None:
    for folder, rule in (("a", "0"), ("b", "2")):
        (here / folder).mkdir()
        Policy(compute="bfloat16", modules={rule: "float32"}).to_file(here / folder / "mine.toml")
    code, printed, _ = run("compare", *TASK, "--policy", "a/mine.toml", "--policy", "b/mine.toml", "--json")
    assert code == 0
    policies = json.loads(printed)["policies"]
    assert {name: each["policy"]["modules"] for name, each in policies.items()} == {
        "a/mine.toml": {"0": "float32"},
        "b/mine.toml": {"2": "float32"},
    }


def test_the_recipes_that_the_command_line_names_are_those_there_are() -> None:
    assert tuple(RECIPES) == names.RECIPES
