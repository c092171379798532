"""`castwise trace`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from castwise import Policy, policies
from castwise._cli import app

FACTORY = """
import torch
def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.LayerNorm(2))
def both():
    return model(), torch.ones(3, 4)
def wrong():
    return 3
class Broken(torch.nn.Module):
    def forward(self, x):
        return x @ torch.ones(3, 3)
def broken():
    return Broken(), torch.ones(2, 4)
def mismatched():
    return model(), torch.ones(2, 5)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "traced_by_test.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])  # as in the program `castwise`
    return tmp_path


def run(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["trace", *options])
    return result.exit_code, result.output


def test_the_gpt_of_the_demo_is_traced_with_and_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "castwise.weights._weight_cache._MIN_TRAINED", 0
    )  # else small weights are left to autocast in training
    code, plain = run()
    assert code == 0
    assert "18 of weights, 9,859,584 bytes: a WeightCache keeps these" in plain
    assert "blocks.1.mlp.0.weight" in plain
    code, cached = run("--weight-cache")
    assert "0 of weights, 0 bytes" in cached
    assert "blocks.1.mlp.0.weight" not in cached


@pytest.mark.parametrize(("factory", "begins_in"), [("broken", "traced_by_test.py"), ("mismatched", "module.py")])
def test_an_error_of_the_model_has_a_traceback_that_begins_in_the_model(
    factory: str, begins_in: str, here: Path
) -> None:
    code, printed = run("--model", f"traced_by_test.py:{factory}")
    assert code == 1
    lines = printed.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert f'{begins_in}", line ' in lines[1]
    # torch 2.15 puts the name of the op before the sentence.
    assert re.match(r"RuntimeError: (\w+: )?mat1 and mat2 shapes cannot be multiplied", lines[-1])


def test_models_and_policies_of_ones_own(here: Path) -> None:
    Policy(compute="bfloat16", modules={"1": "float32"}).to_file(here / "mine.toml")
    for options in (["traced_by_test:both"], ["traced_by_test:model", "--input", "3x4:float32"]):
        code, printed = run("--model", *options, "--policy", "mine.toml", "--json")
        assert code == 0
        seen = json.loads(printed)
        assert {cast["of"] for cast in seen["casts"] if cast["module"] == "1" and cast["phase"] == "forward"} == {
            "activation"
        }


def test_a_model_in_a_file_is_traced_and_finds_its_neighbours(here: Path) -> None:
    (here / "models").mkdir()
    (here / "models" / "sizes_by_test.py").write_text("WIDTH = 4")
    (here / "models" / "net.py").write_text(
        """
from __future__ import annotations
import dataclasses, torch
from sizes_by_test import WIDTH
@dataclasses.dataclass
class Sizes:
    width: int = WIDTH
def make():
    return torch.nn.Linear(Sizes().width, 2), torch.ones(3, WIDTH)
"""
    )
    code, printed = run("--model", "models/net.py:make")
    assert code == 0, printed
    assert printed.split()[0] == "module"  # casts come first
    assert printed.index("float32 to bfloat16") < printed.index("aten.addmm") < printed.index("casts,")


@pytest.mark.parametrize("name", policies.__all__)
def test_ready_policies_are_known_by_name(name: str, here: Path) -> None:
    assert run("--model", "traced_by_test:both", "--policy", name)[0] == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["--model", "torch"],
            "--model must be MODULE:FACTORY or FILE:FACTORY, such as models.gpt:make or models/gpt.py:",
        ),
        (
            ["--model", "nowhere.py:f"],
            "cannot read nowhere.py: No such file or directory; check the path given to --model",
        ),
        (["--model", "n" * 300 + ".py:f"], "n.py: File name too long"),
        (["--model", "broken.py:f"], "broken.py is not a Python file: "),
        (["--model", "traced_by_test.py:bot"], "'traced_by_test.py' has no function 'bot'; did you mean 'both'?"),
        (["--model", "..:f"], "--model must begin with the name of a module, not with a dot, got '..'"),
        (["--model", "torch.nn:Linear"], "torch.nn:Linear must be callable without arguments: missing a required"),
        (["--model", "traced_by_test:model", "--input", "99999999x99999999"], "--input '99999999x99999999': "),
        (
            ["--model", "nowhere:f"],
            "there is no module 'nowhere': check its name, or give FILE:FACTORY, such as models/gpt.py:make",
        ),
        (["--model", "traced_by_test:bot"], "'traced_by_test' has no function 'bot'; did you mean 'both'?"),
        (
            ["--model", "traced_by_test:nothing_like_it"],
            "'; its functions are 'model', 'both', 'wrong', 'broken', 'mismatched'",
        ),
        (["--model", "traced_by_test:wrong"], "traced_by_test:wrong returned int, not a torch.nn.Module"),
        (["--model", "traced_by_test:model"], "returned a model without inputs: add --input"),
        (["--model", "traced_by_test:model", "--input", "3x"], "--input must be a shape such as 8x128"),
        (["--model", "traced_by_test:model", "--input", "3x4:foat"], "'foat' is not a dtype of torch"),
        (
            ["--policy", "bf15"],
            "or one of 'bf16', 'bf16_stable', 'fp16', 'fp16_stable', got 'bf15'; did you mean 'bf16'",
        ),
        (
            ["--policy", "none.toml"],
            "cannot read none.toml: No such file or directory; check the path, or use one of 'bf16', ",
        ),
        (["--policy", "bad.json"], "bad.json: modules['nothing'] matches no module"),
        (["--policy", "worse.json"], "worse.json: Expecting value"),
    ],
)
def test_what_cannot_be_done_is_one_line(options: list[str], text: str, here: Path) -> None:
    Policy(compute="bfloat16", modules={"nothing": "float32"}).to_file(here / "bad.json")
    (here / "worse.json").write_text("x")
    (here / "broken.py").write_text("def")
    code, printed = run(*options)
    assert code == 2
    assert text in printed
    assert printed.count("\n") == 1
