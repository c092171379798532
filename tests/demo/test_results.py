from __future__ import annotations

import io
import json
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from rich.console import Console

from castwise.demo import checkpoint
from castwise.demo.comparison import metrics_line
from castwise.demo.display import display_for
from castwise.demo.gpt import EMULATED, SIZES
from castwise.demo.settings import CASTWISE, TORCH, Training
from castwise.demo.training import Step
from castwise.monitor.run import Run

if TYPE_CHECKING:
    from tests.demo.conftest import Demo

STEPS = 3
ORDER = [
    ("fp32", TORCH),
    ("fp32", CASTWISE),
    ("bf16", CASTWISE),
    ("bf16", TORCH),
    ("fp16", TORCH),
    ("fp16", CASTWISE),
]


def order_of_reading(result: dict[str, str]) -> tuple[int, bool]:
    return ["fp32", "bf16", "fp16"].index(result["precision"]), result["library"] == CASTWISE


class Outcome:
    """A real run of the tiny preset from beginning to end."""

    def __init__(self, demo: Demo) -> None:
        self.demo, self.started = demo, time.time()
        arguments = ["--data", demo.text, "--out", demo.out, "--steps", STEPS, "--device", "cpu", "--seed", -5]
        self.code, self.stdout, self.stderr = demo.run(*arguments)
        (self.folder,) = demo.out.iterdir()
        self.summary = json.loads((self.folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def outcome(demo_in: type[Demo], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Outcome(demo_in(tmp_path_factory.mktemp("outcome")))


def test_libraries_that_agree_exit_with_zero(outcome: Outcome) -> None:
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.summary["identical"] == {"fp32": True, "bf16": True, "fp16": True}
    assert "castwise and torch.amp ended with bit-identical weights." in outcome.stdout
    assert outcome.stdout.endswith(f"results: {outcome.folder}\n")


def test_json_is_all_that_is_printed(outcome: Outcome, tmp_path: Path) -> None:
    folder = shutil.copytree(outcome.folder, tmp_path / "run")
    code, stdout, stderr = outcome.demo.run("--resume", folder, "--json")
    assert (code, stderr) == (0, "")
    printed = json.loads(stdout)
    assert {name: printed[name] for name in outcome.summary} == outcome.summary
    assert printed["monitor_changed_nothing"] is True


def test_a_pipe_gets_a_line_per_training_and_no_control_codes(outcome: Outcome) -> None:
    assert "\x1b" not in outcome.stdout
    assert "\r" not in outcome.stdout
    for precision, library in ORDER:
        assert f"\n{precision} {library:9} 3/3 loss " in outcome.stdout


def test_the_table_has_a_row_per_training(outcome: Outcome) -> None:
    header, _, *rows = outcome.stdout.partition("precision ")[2].splitlines()[:8]
    columns = ["library", "steps", "loss", "ms/step", "tokens/s", "memory", "skipped", "identical"]
    assert header.split() == columns
    for row, result in zip(rows, sorted(outcome.summary["results"], key=order_of_reading), strict=True):
        cells = row.split()
        assert cells[1] == result["library"]
        assert cells[2:4] == ["3", f"{result['loss']:.4f}"]
        assert (cells[-1] == "yes") == (result["library"] == CASTWISE)


def test_metrics_hold_one_object_per_step(outcome: Outcome) -> None:
    lines = outcome.demo.metrics(outcome.folder)
    steps = [(line["precision"], line["library"], line["step"]) for line in lines]
    assert steps == [(*pair, step) for pair in ORDER for step in range(1, STEPS + 1)]
    for line in lines:
        assert set(line) == {
            "precision", "library", "weights", "step", "loss", "tokens_per_s", "scale", "skipped", "time",
        }  # fmt: skip
        assert 2 < line["loss"] < 6
        assert line["tokens_per_s"] > 0
        assert line["scale"] == (65536 if line["precision"] == "fp16" else 1)
        assert line["skipped"] == 0
        assert outcome.started - 1 < line["time"] < time.time() + 1


def test_every_training_starts_from_the_same_weights_and_learns(outcome: Outcome) -> None:
    emulated = outcome.summary["settings"]["emulated"]  # these have a smaller model, so other weights
    first = {True: [], False: []}
    for line in outcome.demo.metrics(outcome.folder):
        if line["step"] == 1:
            first[line["precision"] in emulated].append(line["loss"])
    for losses in first.values():
        assert losses == pytest.approx([losses[0]] * len(losses) if losses else [], rel=1e-3)
    for result in outcome.summary["results"]:
        assert result["loss"] < first[result["precision"] in emulated][0]
        size = EMULATED if result["precision"] in emulated else SIZES["tiny"]
        tokens = size.batch * size.context
        assert result["tokens_per_s"] * result["step_ms"] / 1000 == pytest.approx(tokens)
        assert result["peak_bytes"] is None or 2**20 < result["peak_bytes"] < 2**30
    assert len(set(outcome.demo.digests(outcome.folder))) == 6


def test_resuming_a_finished_run_shows_its_table_again(outcome: Outcome) -> None:
    before = (outcome.folder / "metrics.jsonl").read_bytes()
    code, stdout, _ = outcome.demo.run("--resume", outcome.folder)
    table = outcome.stdout[outcome.stdout.index("precision") :]
    assert code == 0
    assert stdout.endswith(table)
    assert (outcome.folder / "metrics.jsonl").read_bytes() == before


def test_libraries_that_differ_exit_with_one_and_say_where(outcome: Outcome) -> None:
    path = outcome.folder / "checkpoint.pt"
    whole = path.read_bytes()
    loaded = checkpoint.load(path)
    loaded.results[2]["weights_sha256"] = "another"
    checkpoint.save(path, loaded)
    code, stdout, stderr = outcome.demo.run("--resume", outcome.folder)
    path.write_bytes(whole)
    assert (code, stderr) == (1, "")
    assert "castwise and torch.amp DIFFER in bf16.\n" in stdout
    assert " NO" in stdout


def test_a_precision_the_cpu_emulates_has_a_footnote(demo: Demo) -> None:
    _, stdout, _ = demo.run("--resume", demo.prepare(steps=1, checkpoint_every=1))
    assert "fp16*" in stdout
    assert "* fp32 and bf16 and fp16: very slow on this CPU, so trained with a much smaller model." in stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_bits_twice_and_by_both_libraries(demo: Demo) -> None:
    for _ in range(2):
        assert demo.run("--data", demo.text, "--out", demo.out, "--steps", 20, "--device", "cuda")[0] == 0
    once, twice = demo.out.iterdir()
    assert demo.digests(once) == demo.digests(twice)


def test_a_terminal_gets_a_bar_with_loss_speed_scale_and_skipped_steps() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    with display_for(console) as display:
        display.start(Training("fp16", CASTWISE, EMULATED, steps=4), steps_done=1)
        display.step(Step(number=2, loss=3.25, seconds=0.01, scale=32768.0, skipped=1))
    last = screen.getvalue()
    assert "━" in last
    assert "fp16 castwise" in last
    assert "2/4 loss 3.250  25.6k tok/s scale 32768 skipped 1" in last


def test_a_loss_that_is_no_number_is_null_in_the_metrics() -> None:
    line = metrics_line(Training("fp16", CASTWISE, EMULATED, 4), Step(1, math.nan, 0.1, 1.0, 0))
    assert line["loss"] is None
    assert json.loads(json.dumps(line, allow_nan=False)) == line


def test_a_report_says_what_happened_to_the_numbers_and_its_monitor_changed_none(outcome: Outcome) -> None:
    assert "the monitor changed no bits of the weights." in outcome.stdout
    assert f"report: {outcome.folder / 'report.html'}\n" in outcome.stdout
    run = Run.read(outcome.folder)
    assert [step["step"] for step in run.steps] == list(range(1, STEPS + 1))
    assert [sample["step"] for sample in run.samples] == [1, 2]
    assert run.ended
    assert "blocks.0" in (outcome.folder / "report.html").read_text()
