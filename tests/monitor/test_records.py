"""Records as they are in a file: rounded to three digits, without what follows from the rest, thinned."""

from __future__ import annotations

import io
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.recorded import records_in
from torch import nn

import castwise
from castwise.monitor import Run
from castwise.monitor import _record_file as record_file
from castwise.monitor._exponents import count, tally
from castwise.monitor._gzip_members import end_of_whole, gzip_member
from castwise.monitor._gzip_members import samples as samples_of
from castwise.monitor._records import Exponents, SampleRecord, Stats, StepRecord, record_from

Record = dict[str, Any]


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer, and layers with and without a bias."""

    def __init__(self, layers: int = 2, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, width)
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=bool(n % 2)) for n in range(layers)))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.layers(self.embedding(x)).relu()))  # type: ignore[no-any-return]


def recorded(
    path: Path, steps: int = 3, init_scale: float = 2.0**12, spoil: int = 0, model: nn.Module | None = None
) -> list[Record]:
    """Train with a monitor that writes into a file; return what it has given to a function."""
    torch.manual_seed(0)
    model = model or Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = castwise.GradScaler("cpu", init_scale=init_scale)
    records: list[Record] = []
    with castwise.Monitor(model, optimizer, scaler, every=1, sinks=[path, records.append]):
        for number in range(1, steps + 1):
            optimizer.zero_grad()
            loss = model(torch.randint(8, (16,))).square().mean()
            scaler.scale(loss * math.nan if number == spoil else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return records


def assert_alike(one: Any, other: Any) -> None:
    """Compare what was read with what was recorded: numbers to the digits that are kept."""
    if isinstance(other, dict):
        assert one.keys() == other.keys()
        for name in other:
            assert_alike(one[name], other[name])
    elif isinstance(other, list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_alike(mine, theirs)
    else:
        assert one == (
            pytest.approx(other, rel=6e-3, abs=1e-9, nan_ok=True) if isinstance(other, (int, float)) else other
        )


def read(path: Path) -> list[Record]:
    return [sample.to_json() for sample in Run.read(path).samples]


@pytest.mark.parametrize("init_scale", [1.0, 2.0**12, 2.0**-20, 3.0])
def test_samples_are_read_as_they_were_recorded(init_scale: float, tmp_path: Path) -> None:
    samples = [record for record in recorded(tmp_path, init_scale=init_scale) if record["kind"] == "sample"]
    assert set(samples[0]["modules"]) == {"embedding", "layers.0", "layers.1", "head"}
    assert_alike(read(tmp_path), samples)
    assert samples[0]["grad_norm"] > 0
    written = next(record for record in records_in(tmp_path) if record["kind"] == "sample")
    assert ("modules" in written) is ("formats" in written["gradients"]["embedding.weight"])
    assert ("modules" in written) is (init_scale == 3.0)


def test_gradients_that_are_not_finite_are_read_as_such(tmp_path: Path) -> None:
    samples = [record for record in recorded(tmp_path, spoil=2) if record["kind"] == "sample"]
    assert samples[1]["modules"]["head"]["formats"]["fp16"]["headroom_bits"] == -math.inf
    assert_alike(read(tmp_path), samples)


def test_counts_below_a_thousand_are_exact(tmp_path: Path) -> None:
    (given,) = (record for record in recorded(tmp_path, steps=1) if record["kind"] == "sample")
    (sample,) = read(tmp_path)
    for kind in ("gradients", "modules", "activations"):
        exponents = {name: stats["exponents"] for name, stats in given[kind].items()}
        assert {name: stats["exponents"] for name, stats in sample[kind].items()} == exponents


def test_a_step_is_written_without_what_is_usual() -> None:
    usual = {"cause": None, "rank": None, "parameters": [], "grad_norm": None, "seconds": None, "lr": None}
    step = {"kind": "step", "step": 3, "scale": 2.0**24, "skipped": False, "loss": 0.0, **usual}
    record = StepRecord.from_json(step)
    assert record.to_json() == step
    assert record.in_file() == {"kind": "step", "step": 3, "scale": 2.0**24, "loss": 0.0}
    skipped = {**step, "skipped": True, "cause": "overflow", "parameters": ["a"], "grad_norm": math.inf}
    for each in (step, skipped):
        given = StepRecord.from_json(each)
        assert record_from(given.in_file()) == given


def test_sixty_samples_of_three_hundred_modules_take_less_than_two_megabytes(tmp_path: Path) -> None:
    recorded(tmp_path, steps=2, model=Tied(layers=300, width=64))
    content = (tmp_path / "monitor.jsonl.gz").read_bytes()
    sizes = [end - start for start, end in samples_of(io.BytesIO(content))]
    assert len(sizes) == 2
    assert len(content) - sum(sizes) + 60 * max(sizes) < 2 * 2**20


def test_older_samples_are_thinned_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "SAMPLES_BYTES", 20_000)
    recorded(tmp_path, steps=64)
    run = Run.read(tmp_path)
    kept = [sample.step for sample in run.samples]
    assert len(run.steps) == 64
    assert kept[:1] == [1]
    assert kept[-3:] == [62, 63, 64]
    assert 4 < len(kept) < 40
    content = (tmp_path / "monitor.jsonl.gz").read_bytes()
    places = [*samples_of(io.BytesIO(content))]
    assert len(places) == len(kept)
    assert sum(end - start for start, end in places) <= 20_000
    recorded(tmp_path, steps=64)  # in the same file
    assert (tmp_path / "monitor.jsonl.gz").stat().st_size < 20_000 + 2 * 64 * 130 + 2 * 1000


def test_a_record_of_castwise_0_1_is_read(tmp_path: Path) -> None:
    records = recorded(tmp_path / "now")
    for record in records:
        record.pop("owned", None)
    text = (json.dumps(record | ({"format": 1} if record["kind"] == "run" else {})) for record in records)
    (tmp_path / "monitor.jsonl").write_text("".join(f"{line}\n" for line in text))
    run = Run.read(tmp_path)
    for kind, given in (("step", run.steps), ("sample", run.samples)):
        assert [{**record.to_json(), "owned": 0} for record in given] == [
            {**record, "owned": 0} for record in records if record["kind"] == kind
        ]


def test_members_of_samples_are_found_also_across_blocks() -> None:
    content = io.BytesIO()
    places = []
    for size in (1 << 20, (1 << 20) - 100, (1 << 20) + 3):
        for is_sample in (False, True):
            start = content.tell()
            content.write(gzip_member(random.Random(size).randbytes(size - start % 97), is_sample=is_sample))
            places += [(start, content.tell())] * is_sample
    assert [*samples_of(content)] == places
    assert end_of_whole(content) == places[-1][1]
    for cut in (1, 9, 60):
        content.truncate(places[-1][1] - cut)
        assert end_of_whole(content) == places[-1][0]


STATS = Stats(8, 1.5, 0.25, 0.125, 0.0, Exponents(-2, [3, 0, 4]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"largest": "inf"}, "gradients: a: largest must be a finite number >= 0, got inf"),
        ({"largest": -1}, "gradients: a: largest must be a finite number >= 0, got -1"),
        ({"zero": "nan"}, r"gradients: a: zero must be a number in \[0, 1\], got nan"),
        ({"nonfinite": 2}, r"gradients: a: nonfinite must be a number in \[0, 1\], got 2"),
        ({"formats": {"fp16": {}}}, "gradients: a: formats: fp16 lacks flush and subnormal and headroom_bits"),
        ({"formats": {"x": {"flush": 0, "subnormal": 0, "headroom_bits": 0}}}, "a: formats lacks fp16 and bf16 and"),
        ({"numel": None}, "gradients: a: numel must be an integer >= 0, got None"),
    ],
)
def test_what_cannot_be_derived_is_no_sample(changes: Record, message: str) -> None:
    stats = {**STATS.in_file(has_formats=False), **changes}
    sample = {"kind": "sample", "step": 1, "scale": 2, "gradients": {"a": stats}, "owned": {"": ["a"]}}
    with pytest.raises(ValueError, match=f"a sample: .*{message}"):
        record_from(sample)


def test_a_module_without_gradients_of_its_parameters_is_named() -> None:
    with pytest.raises(ValueError, match="a sample: owned: there are no gradients of b"):
        record_from({"kind": "sample", "step": 1, "scale": 1, "owned": {"": ["b"]}})


@pytest.mark.parametrize(("scale", "zero"), [*itertools.product([2.0**-30, 1.0, 2.0**24], [0.0, 0.125])])
def test_what_is_derived_is_what_torch_computes(scale: float, zero: float) -> None:
    values = torch.tensor([1.5, -0.25, 2.0**-20, 0.0 if zero else 3.0]).double() * scale
    stats = tally(count((values / scale).float())).stats()
    owned = {"module": ("a", "b")}
    sample = SampleRecord(1, scale, gradients={"a": stats, "b": stats}, owned=owned)
    module = SampleRecord.from_json(sample.in_file()).modules["module"]
    assert (module.numel, module.zero) == (8, 0.25 if zero else 0.0)
    flushed = (values != 0) & (values.half() == 0)
    assert module.formats["fp16"].flush == flushed.double().mean().item()
