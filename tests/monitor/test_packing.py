"""Records as they lie in a file: packed, rounded to three digits, thinned."""

from __future__ import annotations

import base64
import json
import lzma
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from castwise.monitor.packing import in_full, shortened
from torch import nn

import castwise
from castwise.monitor import JSONL, Run, packing
from castwise.monitor import _record_file as record_file

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
        for each, of_other in zip(one, other, strict=True):
            assert_alike(each, of_other)
    else:
        assert one == (
            pytest.approx(other, rel=6e-3, abs=1e-9, nan_ok=True) if isinstance(other, (int, float)) else other
        )


@pytest.mark.parametrize("init_scale", [1.0, 2.0**12, 2.0**-20, 3.0])
def test_samples_are_read_as_they_were_recorded(init_scale: float, tmp_path: Path) -> None:
    samples = [record for record in recorded(tmp_path, init_scale=init_scale) if record["kind"] == "sample"]
    assert set(samples[0]["modules"]) == {"embedding", "layers.0", "layers.1", "head"}
    assert_alike(Run.read(tmp_path).samples, samples)
    assert samples[0]["grad_norm"] > 0
    assert ("packed" in (tmp_path / "monitor.jsonl").read_text()) is (init_scale != 3.0)


def test_gradients_that_are_not_finite_are_read_as_such(tmp_path: Path) -> None:
    samples = [record for record in recorded(tmp_path, spoil=2) if record["kind"] == "sample"]
    assert samples[1]["modules"]["head"]["formats"]["fp16"]["headroom_bits"] == -math.inf
    assert_alike(Run.read(tmp_path).samples, samples)


def test_counts_below_a_thousand_are_exact(tmp_path: Path) -> None:
    (recorded_sample,) = (record for record in recorded(tmp_path, steps=1) if record["kind"] == "sample")
    (sample,) = Run.read(tmp_path).samples
    for kind in ("gradients", "modules", "activations"):
        exponents = {name: stats["exponents"] for name, stats in recorded_sample[kind].items()}
        assert {name: stats["exponents"] for name, stats in sample[kind].items()} == exponents


def test_a_step_is_written_without_what_is_usual() -> None:
    usual = {"cause": None, "rank": None, "parameters": [], "grad_norm": None, "seconds": None}
    step = {"kind": "step", "step": 3, "scale": 2.0**24, "skipped": False, "loss": 0.0, **usual}
    assert shortened(step) == {"kind": "step", "step": 3, "scale": 2.0**24, "loss": 0.0}
    assert in_full(shortened(step)) == step
    skipped = {**step, "skipped": True, "cause": "overflow", "parameters": ["a"], "grad_norm": math.inf}
    assert in_full(shortened(skipped)) == skipped


def test_names_are_written_once_and_again_by_a_monitor_that_goes_on(tmp_path: Path) -> None:
    kinds = []
    for _ in range(2):
        recorded(tmp_path)
    for line in (tmp_path / "monitor.jsonl").read_text().splitlines():
        kinds.append(json.loads(line)["kind"])
    assert kinds == ["run", "step", "names", "sample", "step", "sample", "step", "sample", "end"] * 2
    assert [sample["step"] for sample in Run.read(tmp_path).samples] == [1, 2, 3]


def names_in(path: Path) -> list[Record]:
    lines = map(json.loads, (path / "monitor.jsonl").read_text().splitlines())
    return [record for record in lines if record["kind"] == "names"]


def test_names_are_written_once_where_steps_are_skipped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, records = Tied(), []
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), castwise.GradScaler("cpu", init_scale=2.0**16)
    with castwise.Monitor(model, optimizer, scaler, every=4, sinks=[tmp_path, records.append]):
        for number in range(1, 21):
            optimizer.zero_grad()
            loss = model(torch.randint(8, (16,))).square().mean()
            scaler.scale(loss * math.inf if number % 2 and number > 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    samples = [record for record in records if record["kind"] == "sample"]
    assert [sample["step"] for sample in samples if not sample["activations"]] == list(range(3, 20, 2))
    assert len(names_in(tmp_path)) == 1
    assert_alike(Run.read(tmp_path).samples, samples)


def test_names_that_come_later_are_added_in_the_order_of_the_model(tmp_path: Path) -> None:
    samples = [record for record in recorded(tmp_path / "x", spoil=1) if record["kind"] == "sample"]
    skipped, full = samples[0] | {"activations": {}}, samples[1]
    with JSONL(tmp_path) as sink:
        for sample in (skipped, full, skipped):
            sink(sample)
    first, second = names_in(tmp_path)
    assert [first["activations"], first["weights"]] == [[], []]
    assert second["activations"] == list(full["activations"])
    assert_alike(Run.read(tmp_path).samples, [skipped, full, skipped])


def test_names_are_written_once_where_only_some_optimizers_step(tmp_path: Path) -> None:
    model, records = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), []
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    scaler = castwise.GradScaler("cpu", init_scale=16.0)
    with castwise.Monitor(model, optimizers, scaler, every=1, sinks=[tmp_path, records.append]):
        for stepped in [optimizers[:1]] * 3 + [optimizers] + [optimizers[1:]] * 3 + [optimizers[:1]] * 3:
            model.zero_grad()
            scaler.scale(model(torch.randn(2, 4)).sum()).backward()
            for optimizer in stepped:
                scaler.step(optimizer)
            scaler.update()
    samples = [record for record in records if record["kind"] == "sample"]
    assert {tuple(sample["owned"]) for sample in samples} >= {("0",), ("1",), ("0", "1")}
    assert len(names_in(tmp_path)) == 2
    assert_alike(Run.read(tmp_path).samples, samples)


def test_a_sample_with_all_names_is_packed_as_before_there_were_rows(tmp_path: Path) -> None:
    recorded(tmp_path, steps=1)
    sample = json.loads((tmp_path / "monitor.jsonl").read_text().splitlines()[3])
    assert set(json.loads(lzma.decompress(base64.b85decode(sample["packed"])))) == {
        "gradients",
        "activations",
        "weights",
    }


@pytest.mark.parametrize("rows", [3, None, [0], "gradients", {"gradients": [9]}, {"weights": [-1]}, {"activations": 0}])
def test_rows_that_are_wrong_are_no_record(rows: Any, tmp_path: Path) -> None:
    recorded(tmp_path, steps=1)
    *lines, end = (tmp_path / "monitor.jsonl").read_text().splitlines()
    sample = json.loads(lines[-1])
    columns = json.loads(lzma.decompress(base64.b85decode(sample["packed"]))) | {"rows": rows}
    broken = json.dumps({**sample, "packed": packed(json.dumps(columns).encode())})
    (tmp_path / "monitor.jsonl").write_text("\n".join([*lines[:-1], broken, end, end]) + "\n")
    with pytest.raises(ValueError, match=r"monitor\.jsonl, line 4 is not a record of a monitor"):
        Run.read(tmp_path)


def test_sixty_samples_of_three_hundred_modules_take_less_than_two_megabytes(tmp_path: Path) -> None:
    recorded(tmp_path, steps=2, model=Tied(layers=300, width=64))
    lines = (tmp_path / "monitor.jsonl").read_bytes().splitlines()
    samples = [len(line) for line in lines if line.startswith(b'{"kind":"sample"')]
    assert sum(map(len, lines)) - sum(samples) + 60 * max(samples) < 2 * 2**20


def test_older_samples_are_thinned_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "SAMPLES_BYTES", 20_000)
    recorded(tmp_path, steps=64)
    run = Run.read(tmp_path)
    kept = [sample["step"] for sample in run.samples]
    assert len(run.steps) == 64
    assert kept[:1] == [1]
    assert kept[-3:] == [62, 63, 64]
    assert 4 < len(kept) < 40
    lines = (tmp_path / "monitor.jsonl").read_bytes().splitlines(keepends=True)
    assert sum(len(line) for line in lines if line.startswith(b'{"kind":"sample"')) <= 20_000
    recorded(tmp_path, steps=64)  # in the same file
    assert (tmp_path / "monitor.jsonl").stat().st_size < 20_000 + 2 * 64 * 100


def test_a_record_of_castwise_0_1_is_read(tmp_path: Path) -> None:
    records = recorded(tmp_path / "now")
    (tmp_path / "monitor.jsonl").write_text(
        "".join(
            json.dumps(record | ({"format": 1} if record["kind"] == "run" else {})) + "\n"
            for record in records
            if record.pop("owned", None) or True
        )
    )
    run = Run.read(tmp_path)
    assert [run.steps, run.samples] == [[r for r in records if r["kind"] == kind] for kind in ("step", "sample")]


def packed(content: bytes) -> str:
    return base64.b85encode(lzma.compress(content)).decode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("no base 85: \x00", "it cannot be unpacked"),
        (base64.b85encode(b"no xz").decode(), "it cannot be unpacked"),
        (packed(b"[" * 100_000), "it cannot be unpacked"),
        (packed(b"{}"), "its columns are not those of a sample"),
        (packed(b" " * ((64 << 20) + 1)), "it has more than 67,108,864 bytes, the limit for a record"),
        (base64.b85encode(lzma.compress(b"{}" * 99)[:-9]).decode(), "it is truncated"),
    ],
)
def test_what_cannot_be_unpacked_is_no_record(data: str, message: str, tmp_path: Path) -> None:
    recorded(tmp_path, steps=1)
    *lines, end = (tmp_path / "monitor.jsonl").read_text().splitlines()
    broken = json.dumps({**json.loads(lines[-1]), "packed": data})
    (tmp_path / "monitor.jsonl").write_text("\n".join([*lines[:-1], broken, end, end]) + "\n")
    with pytest.raises(ValueError, match=f"monitor.jsonl, line 4 is not a record of a monitor: .*{message}"):
        Run.read(tmp_path)


@pytest.mark.parametrize("column", ["numel", "zero", "nonfinite", "largest", "smallest", "lowest", "counts"])
@pytest.mark.parametrize("wrong", [[], [-5000] * 5, ["1"] * 5, [[0.5]] * 5, 3, None, [1e999] * 5])
def test_a_column_that_is_wrong_is_no_record(column: str, wrong: Any, tmp_path: Path) -> None:
    recorded(tmp_path, steps=1)
    *lines, end = (tmp_path / "monitor.jsonl").read_text().splitlines()
    sample = json.loads(lines[-1])
    columns = json.loads(lzma.decompress(base64.b85decode(sample["packed"])))
    assert len(columns["gradients"][column]) == 4
    columns["gradients"][column] = wrong[:4] if isinstance(wrong, list) else wrong
    broken = json.dumps({**sample, "packed": packed(json.dumps(columns).encode())})
    (tmp_path / "monitor.jsonl").write_text("\n".join([*lines[:-1], broken, end, end]) + "\n")
    with pytest.raises(ValueError, match=r"monitor\.jsonl, line 4 is not a record of a monitor"):
        Run.read(tmp_path)


def test_many_samples_that_each_unpack_to_less_than_the_limit_are_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MOST_BYTES", 1 << 16)
    recorded(tmp_path, steps=1)
    head, step, names, sample, end = (tmp_path / "monitor.jsonl").read_text().splitlines()
    columns = lzma.decompress(base64.b85decode(json.loads(sample)["packed"]))
    padded = json.dumps({**json.loads(sample), "packed": packed(columns + b" " * (60_000))})
    given = [padded.replace('"step": 1', f'"step": {number}') for number in range(1, 400)]
    (tmp_path / "monitor.jsonl").write_text("\n".join([head, step, names, *given, end]) + "\n")
    size, unpacked = (tmp_path / "monitor.jsonl").stat().st_size, 0
    decompressed = packing.Unpacker.decompressed

    def count(self: packing.Unpacker, content: bytes) -> bytes:
        nonlocal unpacked
        got = decompressed(self, content)
        unpacked += len(got)
        return got

    monkeypatch.setattr(packing.Unpacker, "decompressed", count)
    with pytest.raises(ValueError, match=r"samples have more than .* bytes, the limit for a file of this size"):
        Run.read(tmp_path)
    assert unpacked <= (1 << 16) + 64 * size


def test_owners_of_names_are_looked_up_by_name_and_not_for_each_sample() -> None:
    looked_up = 0

    class Owned(dict[str, list[str]]):
        def items(self) -> Any:
            nonlocal looked_up
            looked_up += 1
            return super().items()

    names = packing.Names({**packing.NO_NAMES, "owned": Owned({"b": ["b.1", "b.0"], "a": ["a.0", "b.0"], "c": []})})
    assert [names.owned(["a.0", "b.0", "b.1"]) for _ in range(5)] == [{"b": ["b.1", "b.0"], "a": ["a.0", "b.0"]}] * 5
    assert looked_up == 1
