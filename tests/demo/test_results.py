"""What `castwise demo` prints, writes and returns."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console
from tests.demo.test_training import trained

import castwise
from castwise._cli import app
from castwise._demo import command
from castwise._demo.command import compared, runs_of
from castwise._demo.gpt import EMULATED, SIZES
from castwise._demo.table import print_results
from castwise._demo.training import CASTWISE, MASTER_WEIGHTS, TORCH, Result
from castwise.monitor import Run

if TYPE_CHECKING:
    from tests.demo.conftest import Demo

STEPS = 3
ROWS = [(precision, library) for precision in ("fp32", "bf16", "fp16") for library in (TORCH, CASTWISE)]


class Outcome:
    """A real run, twice into the same folder, which is not empty: as a table, and as JSON."""

    def __init__(self, demo: Demo) -> None:
        self.demo = demo
        demo.out.mkdir()
        model = torch.nn.Linear(2, 1)
        with castwise.Monitor(model, torch.optim.SGD(model.parameters()), sinks=[demo.out]):
            pass
        (demo.out / "report.html").write_text("mine")
        self.before = {path.name: path.read_bytes() for path in demo.out.iterdir()}
        self.code, self.stdout, self.stderr = demo.run("--steps", STEPS)
        self.json_code, printed, self.json_stderr = demo.run("--steps", STEPS, "--json")
        self.summary: dict[str, Any] = json.loads(printed)


@pytest.fixture(scope="module")
def outcome(demo_in: type[Demo], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Outcome(demo_in(tmp_path_factory.mktemp("outcome")))


def test_libraries_that_agree_exit_with_zero(outcome: Outcome) -> None:
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "All losses and weights are bit-identical.\n" in outcome.stdout
    assert (outcome.json_code, outcome.json_stderr) == (0, "")
    names = ["fp32 castwise", "bf16 castwise", "fp16 castwise", "fp16 castwise, monitored"]
    assert outcome.summary["identical"] == dict.fromkeys(names, True)


def test_what_is_in_the_folder_stays(outcome: Outcome) -> None:
    """Another program's files, and the record of a run that is worth more than a demo."""
    out, before = outcome.demo.out, outcome.before
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.name in before} == before
    assert len(before) > 1
    assert len(list(out.glob("*/monitor.jsonl.gz"))) == 2


def test_a_pipe_gets_a_line_per_training_run_and_no_control_codes(outcome: Outcome) -> None:
    assert "\x1b" not in outcome.stdout
    assert "\r" not in outcome.stdout
    for row in ROWS:
        assert f"\n{' '.join(row):18} loss " in outcome.stdout


def test_the_table_has_a_row_per_training_run_and_fits_80_columns(outcome: Outcome) -> None:
    lines = outcome.stdout.partition(" precision ")[2].splitlines()
    columns = ["library", "loss", "ms/step", "tokens/s", "memory", "bytes", "skips", "identical"]
    assert lines[0].split() == columns
    assert max(map(len, lines[1:8])) <= 80
    for line, result, row in zip(lines[2:8], outcome.summary["results"], ROWS, strict=True):
        cells = line.split()
        assert (cells[0].rstrip("*"), cells[1]) == (result["precision"], result["library"]) == row
        assert cells[2] == f"{result['loss']:.4f}"  # of both runs: they are deterministic
        assert (cells[-1] == "yes") == (result["library"] == CASTWISE)


def test_numbers_in_the_table_fit_together(outcome: Outcome) -> None:
    for result in outcome.summary["results"]:
        assert 2 < result["loss"] < 6
        tokens = result["tokens_per_s"] * result["step_ms"] / 1000
        assert round(tokens) in {SIZES["tiny"].tokens, EMULATED.tokens}
        assert result["peak_bytes"] is None or 2**20 < result["peak_bytes"] < 2**30
        assert result["stored_bytes"] == pytest.approx(16 if result["precision"] == "fp32" else 18, abs=0.1)
        assert result["skipped"] == 0


def test_a_report_shows_the_second_run_and_its_monitor_changed_no_bit(outcome: Outcome) -> None:
    out = Path(outcome.summary["report"]).parent  # of the last demo
    assert "the monitor changed no bits of losses and weights." in outcome.stdout
    assert re.search(rf"^report: {re.escape(str(outcome.demo.out))}/\S+/report.html$", outcome.stdout, re.M)
    assert out.parent == outcome.demo.out
    run = Run.read(out)
    assert [step.step for step in run.steps] == list(range(1, STEPS + 1))
    assert [sample.step for sample in run.samples] == [1, 2]
    assert run.ended
    assert "blocks.0" in (out / "report.html").read_text()
    assert (outcome.demo.out / "latest").read_text() == f"{out.name}\n"


def printed(results: list[Result], emulated: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    print_results(Console(width=100), results, compared(results), emulated)
    return capsys.readouterr().out


def test_runs_that_differ_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    torchs, ours = trained(TORCH), trained(CASTWISE)
    assert compared([torchs, ours]) == {"fp16 castwise": True}
    other_weights = {**ours.weights, "head.bias": -ours.weights["head.bias"]}
    for other in (replace(ours, losses=[0.0, *ours.losses[1:]]), replace(ours, weights=other_weights)):
        assert compared([torchs, other]) == {"fp16 castwise": False}
        assert "DIFFERENT BITS: fp16 castwise.\n" in printed([torchs, other], [], capsys)


def test_runs_that_differ_exit_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run", lambda *_: {"identical": {"fp32 castwise": True, "bf16 castwise": False}})
    with pytest.raises(SystemExit) as ended:
        app(["demo"])
    assert ended.value.code == 1


def test_a_zero_with_another_sign_is_another_bit() -> None:
    result = trained(TORCH)
    zeros = {"head.bias": torch.zeros(256)}
    positive, negative = replace(result, weights=zeros), replace(result, weights={"head.bias": -zeros["head.bias"]})
    assert positive.has_bits_of(positive)
    assert not positive.has_bits_of(negative)


def test_a_precision_that_the_cpu_emulates_has_a_footnote_and_a_smaller_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = printed([trained(TORCH), trained(CASTWISE)], ["fp16"], capsys)
    assert "fp16*" in table
    assert "* fp16: emulated by this CPU, so trained with a much smaller model." in table
    sizes = {training.precision: training.size for training in runs_of("fp32", 1, ["fp16"])}
    assert sizes == {"fp32": SIZES["tiny"], "bf16": SIZES["tiny"], "fp16": EMULATED}


def test_the_libraries_take_turns_at_going_first() -> None:
    libraries = [training.library for training in runs_of("fp32", 1, [])]
    assert libraries == [TORCH, CASTWISE, CASTWISE, TORCH, TORCH, CASTWISE]


def test_16_bit_weights_are_compared_with_fp32_weights(demo: Demo) -> None:
    code, stdout, stderr = demo.run("--weights", "bf16-split", "--steps", 2)
    assert (code, stderr) == (0, "")
    assert "All losses and weights are bit-identical.\n" in stdout
    rows = [line.split() for line in stdout.partition(" precision ")[2].splitlines()[2:4]]
    assert [row[1] for row in rows] == [CASTWISE, MASTER_WEIGHTS]
    assert [row[-3] if row[-1] == "yes" else row[-2] for row in rows] == ["18.0", "14.0"]
    assert not demo.out.exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_bits_twice_and_by_both_libraries(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            app(
                [
                    "demo",
                    "--data",
                    str(demo.text),
                    "--out",
                    str(demo.out),
                    "--steps",
                    "20",
                    "--device",
                    "cuda",
                    "--json",
                ]
            )
        assert ended.value.code == 0
        losses.append([result["loss"] for result in json.loads(capsys.readouterr().out)["results"]])
    assert losses[0] == losses[1]
