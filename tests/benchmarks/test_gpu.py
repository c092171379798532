"""The parts of `make gpu`. `python -m benchmarks.gpu --rehearse` runs them all, on the simulated accelerator."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.__main__ import parse
from benchmarks.gpu import ROOT, Part, parts, run
from benchmarks.gpu_rehearsal import project_on_sim
from typer.testing import CliRunner

from benchmarks import gpu, recipe_speed
from castwise._cli import app


@pytest.mark.parametrize("is_small", [False, True])
def test_the_commands_are_understood(is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _, _, benchmarks, _, demo, _ = parts(is_small=is_small)
    options = parse(benchmarks.arguments[2:])
    assert (options.device, options.only, options.out) == ("cuda", list(gpu.BENCHMARKS), gpu.RESULTS)
    assert options.full != is_small
    known = CliRunner().invoke(app, [*demo.arguments[2:], "--help"])
    assert known.exit_code == 0, known.output


def test_all_parts_together_end_in_nine_minutes() -> None:
    assert sum(part.seconds for part in parts()) <= 9 * 60


NEEDED = {"castwise", "torch", "numpy", "pytest", "hypothesis", "rich", "typer"}


def imported_by(file: Path, seen: set[Path]) -> set[str]:
    """Return the packages that a file imports when it is imported, also by way of tests and benchmarks."""
    if file in seen or not file.exists():
        return set()
    seen.add(file)
    body = ast.parse(file.read_text()).body
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    packages = {name.partition(".")[0] for name in names}
    for name in names:
        if name.startswith(("tests.", "benchmarks.")):
            packages |= imported_by(ROOT.joinpath(*name.split(".")).with_suffix(".py"), seen)
    return packages


def test_the_tests_need_only_the_packages_that_are_named() -> None:
    seen = {ROOT / "tests/conftest.py"}
    packages = imported_by(ROOT / "tests/conftest.py", set())
    for part in parts()[:2]:
        words = part.arguments
        assert "--confcutdir=tests" in words  # the other conftest.py runs the manual's code
        named = [ROOT / word for word in words if word.startswith("tests")]
        for file in [each for path in named for each in (path.rglob("*.py") if path.is_dir() else [path])]:
            packages |= imported_by(file, seen)
    assert ROOT / "tests/accelerator/training.py" in seen
    assert ROOT / "tests/amp/test_grad_scaler_gpu.py" in seen
    assert packages - sys.stdlib_module_names <= {*NEEDED, "tests", "benchmarks"}


def test_recipes_are_compared_with_torchaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_speed, "NAMES", ("float8_rowwise",))
    recipe_speed.main(["--device", "cpu"], tmp_path)
    record = json.loads((tmp_path / "recipe_speed-cpu.json").read_text())
    found = record["recipes"]["float8_rowwise"]
    assert list(found["times bf16"]) == ["castwise", "torchao"]
    assert found["ms"].keys() == {"torch", "castwise", "torchao"}


def test_what_fails_or_takes_too_long_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(Part("good", ("-c", "print('done')"), 60)) == ""
    assert run(Part("bad", ("-c", "raise SystemExit(3)"), 60)) == "bad: exit code 3"
    assert run(Part("slow", ("-c", "import time; time.sleep(60)"), 1)) == "slow: not done after 1 s"
    assert "done" in capfd.readouterr().out


def test_the_rest_is_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def failing(part: Part, *, patience: int = 1) -> str:
        done.append(part.name)
        return part.name

    monkeypatch.setattr(gpu, "run", failing)
    assert gpu.main([]) == 1
    assert done == [part.name for part in parts()]
    assert done[-1] == "first pages"


def test_in_a_rehearsal_code_for_cuda_runs_on_the_simulated_accelerator(tmp_path: Path) -> None:
    project_on_sim(tmp_path)
    for name in ("benchmarks/step_cost.py", "src/castwise/_demo/hardware.py", "tests/amp/test_grad_scaler_gpu.py"):
        code = (tmp_path / name).read_text()
        assert '"cuda"' not in code
        assert "import torch" in code
        assert "torch.cuda." not in code
        assert '"sim"' in code
    assert (tmp_path / "src/castwise/amp/_devices.py").read_text() == (
        ROOT / "src/castwise/amp/_devices.py"
    ).read_text()
