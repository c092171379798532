"""Capsules: files with which a diagnosed fault is replayed elsewhere."""

from __future__ import annotations

import json
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import castwise
from castwise._cli import app
from castwise._installation import begin, end
from castwise._installation.account import Account
from castwise._installation.settings import Settings
from castwise.diagnosis import Capsule, _capsule, _tensor_file
from castwise.diagnosis._loaded_batches import LOADED_BATCHES
from castwise.diagnosis._tensor_file import Contents

MODEL = Path(__file__).parent / "capsule_model.py"
scope: dict[str, Any] = {"__name__": "capsule_model"}
exec(compile(MODEL.read_text(), str(MODEL), "exec"), scope)
make: Callable[[], Any] = scope["make"]
dtypes = list(_tensor_file._DTYPES.values())


class Gain(float):
    """An argument that a file cannot hold."""


def train(out: Path, *, faults: dict[int, float], capsules: int = 3) -> None:
    """Train a model with a fault in some steps: a gain that overflows, or NaN for an input that is."""
    torch.manual_seed(0)
    begin(Account(out, 100, 10.0, capsules=capsules), Settings(None, None, False))
    try:
        model = make()
        model.calls.eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, 6):
            x, gain = torch.randn(8, 4), faults.get(step, 1.0)
            if gain != gain:
                x[3], gain = gain, 1.0
            with castwise.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x, gain=gain).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            if not faults.get(step):
                optimizer.step()
                continue
            weights = [param.detach().clone() for param in model.parameters()]
            optimizer.step()
            with torch.no_grad():  # as if the next step began from a checkpoint
                for param, weight in zip(model.parameters(), weights, strict=True):
                    param.copy_(weight)
                model.norm.reset_running_stats()
    finally:
        end()


def written(out: Path) -> list[Path]:
    return sorted(out.glob("*/*/capsule-*.safetensors"))


@pytest.fixture(scope="module")
def capsule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    train(out, faults={3: 1e38})
    (path,) = written(out)
    return path


@pytest.fixture(scope="module")
def replayed(capsule: Path) -> SimpleNamespace:
    read, model = Capsule.read(capsule), make()
    return SimpleNamespace(capsule=read, model=model, found=read.diagnose(model))


# -- what it holds and replays --------------------------------------------------------------------------------------


def test_a_fault_is_replayed_with_another_model_as_in_the_run(replayed: SimpleNamespace) -> None:
    found, capsule = replayed.found, replayed.capsule
    assert (found.phase, found.module, found.op) == ("forward", "calls", "aten.mul")
    assert (capsule.step, capsule.model, capsule.has_weights) == (3, "Net", True)
    assert str(found) == capsule.text
    assert [module.training for module in replayed.model.children()] == [True, True, False, True, True]


def test_all_ops_have_the_bits_of_the_run(replayed: SimpleNamespace) -> None:
    state = torch.get_rng_state()
    assert replayed.capsule.ops > 20
    assert replayed.capsule.first_difference(replayed.model) == ""
    assert torch.equal(torch.get_rng_state(), state)


def test_the_first_op_with_other_bits_is_named(replayed: SimpleNamespace) -> None:
    model = make()
    model.drop.p = 0.25  # and not 0.5
    assert "aten.bernoulli_ in drop (op " in replayed.capsule.first_difference(model)
    model = make()
    model.calls.forward = lambda x, gain: x
    assert replayed.capsule.first_difference(model).endswith("and was aten.mul in calls")


def test_a_loss_function_may_be_given(replayed: SimpleNamespace) -> None:
    found = replayed.capsule.diagnose(make(), lambda y: y.float().square().mean())
    assert (found.phase, found.module, found.op) == ("forward", "calls", "aten.mul")


def test_a_model_with_other_parameters_is_refused(replayed: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"first\.weight is \(8, 4\) in the run and missing in this model"):
        replayed.capsule.diagnose(nn.Linear(2, 2))


def test_the_command_replays_it(capsule: Path) -> None:
    result = CliRunner().invoke(app, ["diagnose", str(capsule), "--model", f"{MODEL}:make"])
    assert result.exit_code == 0, result.output
    assert "forward: calls: aten.mul gives inf" in result.output
    assert "ops gave the bits of the run." in result.output
    options = ["--model", f"{MODEL}:make", "--loss", f"{MODEL}:loss", "--json"]
    facts = json.loads(CliRunner().invoke(app, ["diagnose", str(capsule), *options]).output)
    assert (facts["same_bits"], facts["step"]) == (True, 3)
    refused = CliRunner().invoke(app, ["diagnose", str(MODEL), "--model", f"{MODEL}:make"])
    assert refused.exit_code == 2
    assert "is not a safetensors file" in refused.output


def test_the_report_names_it(capsule: Path) -> None:
    for option in ("--json", "--text"):
        output = CliRunner().invoke(app, ["report", str(capsule.parents[1]), option]).output
        assert str(capsule) in "".join(output.split())  # lines may be broken


# -- what is written, and how much ----------------------------------------------------------------------------------


def test_only_its_owner_can_read_it_and_nothing_else_is_left(capsule: Path) -> None:
    assert stat.S_IMODE(capsule.stat().st_mode) == 0o600
    assert sorted(path.name for path in capsule.parent.iterdir()) == ["capsule-3.safetensors", "monitor.jsonl.gz"]


@pytest.mark.parametrize(("capsules", "names"), [(0, []), (1, ["capsule-2"]), (3, ["capsule-2", "capsule-4"])])
def test_a_run_has_one_for_each_fault_and_not_too_many(tmp_path: Path, capsules: int, names: list[str]) -> None:
    train(tmp_path, faults={2: 1e38, 3: 1e38, 4: float("nan")}, capsules=capsules)
    assert [path.stem for path in written(tmp_path)] == names


def test_recordings_of_models_that_do_not_step_end_with_the_run(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(tmp_path, faults={})
    assert LOADED_BATCHES._followers == 0
    assert optimizer.param_groups


def test_weights_that_are_too_large_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_capsule, "MOST_BYTES", 500)
    train(tmp_path, faults={3: 1e38})
    (path,) = written(tmp_path)
    read = Capsule.read(path)
    assert not read.has_weights
    assert read.diagnose(make()).module == "calls"  # with this model's weights


@pytest.mark.parametrize("what", ["a batch that is too large", "other objects", "a full disk"])
def test_nothing_is_written_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    gain: float = 1e38
    if what == "a full disk":
        monkeypatch.setattr(_capsule.shutil, "disk_usage", lambda _: SimpleNamespace(total=1000, free=100))
    elif what == "other objects":
        gain = Gain(gain)
    else:
        monkeypatch.setattr(_capsule, "MOST_BYTES", 10)
    train(tmp_path, faults={3: gain})
    assert written(tmp_path) == []


def test_a_file_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        _tensor_file.write(tmp_path / "a", Contents({}, {}))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensor: Tensor) -> Iterator[Any]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_tensor_file, "_bytes_of", full)
    with pytest.raises(OSError, match="No space left"):
        _tensor_file.write(tmp_path / "a", Contents({}, {"x": torch.ones(3)}))
    assert list(tmp_path.iterdir()) == []


# -- the format -----------------------------------------------------------------------------------------------------


def test_tensors_come_back_with_their_bits(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.randn(3, 5).to(dtype) for dtype in dtypes}
    tensors |= {"empty": torch.empty(0, 3), "number": torch.tensor(1.5), "strided": torch.randn(4, 6).t()[::2]}
    tensors["nan"] = torch.tensor([torch.nan, -torch.inf], dtype=torch.bfloat16)
    _tensor_file.write(tmp_path / "a", Contents({"a": "b"}, tensors))
    read = _tensor_file.read(tmp_path / "a")
    assert read.texts == {"a": "b"}
    assert list(read.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert (read.tensors[name].dtype, read.tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(read.tensors[name]), bits(tensor)), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_other_readers_of_the_format_read_it(capsule: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    theirs, ours = safetensors.load_file(capsule), _tensor_file.read(capsule).tensors
    assert set(theirs) == set(ours)
    assert all(torch.equal(bits(theirs[name]), bits(tensor)) for name, tensor in ours.items())


def test_damaged_capsules_are_capsules_or_refused(capsule: Path, tmp_path: Path) -> None:
    whole, draw, path = capsule.read_bytes(), random.Random(0), tmp_path / "a"
    refused = 0
    for number in range(150):
        damaged = bytearray(whole)
        if number % 3 == 0:
            damaged = damaged[: draw.randrange(len(damaged))]
        else:
            for _ in range(3):
                damaged[draw.randrange(3000 if number % 3 == 1 else len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        with suppress(ValueError):
            Capsule.read(path)
            continue
        refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]},
        {"dtype": "O", "shape": [1], "data_offsets": [0, 4]},
        {"shape": [1]},
        7,
    ],
)
def test_shapes_that_do_not_fit_are_refused(tmp_path: Path, entry: Any) -> None:
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(ValueError, match="'x'"):
        _tensor_file.read(tmp_path / "a")
    assert os.path.getsize(tmp_path / "a") < 200
