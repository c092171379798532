"""Pictures are what their scripts draw from committed results, each is on a page, and their measurements run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from castwise._demo.corpus import Corpus
from castwise._demo.gpt import Size
from castwise.monitor import Run

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
SCRIPTS = [
    "loss_scaling",
    "number_formats",
    "ranks",
    "step_traffic",
    "weight_bits",
    "recipes",
    "first_page",
    "terminal",
]
TINY = Size(layers=1, heads=1, width=8, context=4, batch=2)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a script from beside what it imports."""

    def load(path: Path) -> dict[str, Any]:
        monkeypatch.syspath_prepend(str(path.parent))
        return runpy.run_path(str(path))

    return load


def corpus() -> Corpus:
    return Corpus(bytes(range(256)) * 4, TINY.context)


def test_each_picture_is_what_its_script_draws_from_committed_results(script: Any) -> None:
    drawn = {
        f"{picture}.svg": str(svg)
        for name in SCRIPTS
        for picture, svg in script(PICTURES / f"{name}.py")["pictures"]().items()
    }
    assert drawn == {path.name: path.read_text() for path in PICTURES.glob("*.svg")}


def test_each_picture_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    shown = set(re.findall(r"[ (](?:\.\./)?pictures/([\w.-]+\.(?:svg|png))", pages))
    assert shown == {path.name for path in PICTURES.iterdir() if path.suffix in {".svg", ".png"}}


def test_what_the_terminal_shows_is_what_a_run_prints(script: Any) -> None:
    """Numbers of the run depend on the machine; the line, the sample and the trial do not."""
    terminal = script(PICTURES / "terminal.py")
    shown = ("hidden = ", "Sample ", "This op is not finite", "Tried on")

    def lines(text: str) -> list[str]:
        stripped = (re.sub(r"\x1b\[[\d;]*m", "", line).strip() for line in text.splitlines())
        return [line for line in stripped if line.startswith(shown)]

    assert len(lines(terminal["RECORDED"].read_text())) == len(shown)
    assert lines(terminal["record"]()) == lines(terminal["RECORDED"].read_text())


def test_a_histogram_has_a_bar_for_each_exponent_that_is_shown(script: Any) -> None:
    drawing = script(PICTURES / "loss_scaling.py")
    tally = {"by exponent": {"-60": 9, "-3": 1, "0": 2}, "share of zeros": 0.25}
    kinds = {"outputs of linear layers": tally}
    found = {"scale": 4.0, "gradients": dict.fromkeys(("fp32", "fp16", "fp16, scaled"), kinds)}
    svg = str(drawing["exponents"](found))
    assert svg.count('fill="#2b87c7"') == 6
    assert svg.count("zero: 25.00%") == 3


def test_a_scale_is_drawn_with_its_skips(script: Any) -> None:
    drawing = script(PICTURES / "loss_scaling.py")
    svg = str(drawing["scale"]({"scales": [4.0, 4.0, 2.0], "skipped": [2]}))
    assert svg.count("<circle") == 2, "one of them in the legend"


def test_traffic_is_as_long_as_it_is_much(script: Any) -> None:
    drawing = script(PICTURES / "step_traffic.py")
    steps = {step: {"reads": 2.0, "writes": 0.5} for step in drawing["STEPS"]}
    results = {f"1B, {name}": {"gradient_traffic_before_the_optimizer": steps} for name in drawing["OPTIMIZERS"]}
    svg = str(drawing["traffic"](results, "1B"))
    assert (svg.count('width="260"'), svg.count('width="65"')) == (10, 10)


def test_ranks_that_agree_are_one_line(script: Any) -> None:
    drawing = script(PICTURES / "ranks.py")
    of_rank = [{"scale": 2.0 ** (step // 5), "loss": 1.0 / (step + 1)} for step in range(20)]
    svg = str(drawing["apart"]({"torch": [of_rank] * 2, "castwise": [of_rank] * 2}))
    lines = re.findall(r'points="([^"]*)"', svg)
    assert len([line for line in lines if line.count(",") == 40 and line.startswith("60,190")]) == 3


def test_hops_are_those_of_a_tree_and_a_ring(script: Any) -> None:
    drawing = script(PICTURES / "ranks.py")
    assert [drawing["hops_of_tree"](ranks) for ranks in (2, 8, 1024, 100_000)] == [2, 6, 20, 34]
    assert [drawing["hops_of_ring"](ranks) for ranks in (2, 8, 1024)] == [2, 14, 2046]


def test_a_format_has_the_numbers_that_torch_has(script: Any) -> None:
    drawing = script(PICTURES / "number_formats.py")
    for name, dtype in {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}.items():
        of_torch = torch.arange(128, dtype=torch.uint8).view(dtype).double()
        assert drawing["positive"](drawing[name], 6.0) == of_torch[of_torch <= 6].tolist()
    assert drawing["positive"](drawing["E2M1"], 6.0) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.filterwarnings("ignore:this CPU has no units")
def test_the_run_of_the_report_can_be_trained_again(script: Any, tmp_path: Path, monkeypatch: Any) -> None:
    drawing = script(PICTURES / "report.py")
    train = drawing["train"]
    monkeypatch.setitem(train.__globals__, "BAD_STEP", 2)
    monkeypatch.setitem(train.__globals__, "read_text", lambda _: bytes(range(256)) * 4)
    train(tmp_path, TINY, steps=3, every=1)
    assert [step.cause for step in Run.read(tmp_path).steps] == [None, "non-finite loss", None]


@pytest.mark.filterwarnings("ignore:this CPU has no units")
def test_exponents_of_gradients_can_be_measured_again(script: Any) -> None:
    found = script(ROOT / "benchmarks" / "gradient_exponents.py")["measure"](TINY, 2, 3, corpus())
    tallies = [tally for kinds in found["gradients"].values() for tally in kinds.values()]
    assert len(tallies) == 6
    assert all(tally["numbers"] == tally["zero"] + sum(tally["by exponent"].values()) for tally in tallies)
    assert len(found["run"]["scales"]) == 3


@pytest.mark.filterwarnings("ignore")  # FSDP1 says that one rank has nothing to split
def test_the_spike_of_the_ranks_that_drift_apart_skips_a_step(script: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        known = script(ROOT / "benchmarks" / "ranks_apart.py")["train"]("castwise", 11)
    finally:
        dist.destroy_process_group()
    assert [step["skipped"] for step in known] == [False] * 9 + [True, False]
