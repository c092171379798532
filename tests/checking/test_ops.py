"""The ops that differ between two versions of a program are named, with module, line, dtypes and arguments."""

from __future__ import annotations

import difflib
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checking.programs import program
from torch import nn
from torch.utils.data import DataLoader

from castwise.checking import OpDifferences, _ops, check, compare_ops, record
from castwise.checking._measuring import Plan, measure
from castwise.checking._ops import OpCall, Where, differences

SOURCE = Path(__file__).with_name("programs.py")


def line_of(text: str) -> str:
    lines = SOURCE.read_text().splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if text in line]
    assert len(numbers) == 1
    return f"{SOURCE.name}:{numbers[0]}"


def compared(**changes: Any) -> OpDifferences:
    return compare_ops(program(dtype=torch.bfloat16), program(dtype=torch.bfloat16, **changes))


def test_the_same_program_runs_the_same_ops_with_the_same_results() -> None:
    found = compared()
    assert (found.differences, found.first_result) == ((), None)
    assert found.before == found.now > 400
    ops = f"{found.now:,}"
    assert found.lines() == [
        f"{ops} ops before, {ops} now: 0 differences",
        "  of the ops that both run, all have the same results",
    ]


def test_an_argument_is_named_with_its_values_and_the_line_of_its_op() -> None:
    (found,) = compared(second={"eps": 1e-6}).differences
    assert (found.phase, found.modules, found.rounds_more) == ("forward", ("blocks.1.norm",), False)
    assert found.changes == ("native_layer_norm, eps 1e-05 is now 1e-06",)
    assert found.place.endswith(line_of("y = self.down("))


def test_one_more_rounding_to_bfloat16_is_named_though_no_value_tells_it() -> None:
    def train(cast: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(torch.randn(32, 8)).float().to(cast).softmax(-1)
            optimizer.zero_grad()
            out.float().square().sum().backward()
            optimizer.step()

    changed = functools.partial(train, torch.bfloat16)
    assert check(changed, record(train, 2)).kind == "same"
    found = compare_ops(train, changed)
    first = found.differences[0]
    assert (first.phase, first.modules, first.rounds_more) == ("forward", (), True)
    assert Path(first.place.partition(":")[0]).name == "test_ops.py"
    assert "_softmax float32 is now bfloat16" in first.changes
    assert "rounds to fewer bits" in found.lines()[1]


def test_another_optimizer_and_another_loss_are_named() -> None:
    betas = compared(betas=(0.9, 0.99)).differences
    assert {found.phase for found in betas} == {"optimizer"}
    assert any("other 0.999 is now 0.99" in change for found in betas for change in found.changes)
    loss = compared(loss_bug=1e-4).differences
    assert {(found.phase, found.modules) for found in loss} == {("forward", ()), ("backward", ())}
    assert loss[0].place.endswith(line_of("scaler.scale(loss + loss_bug"))
    assert loss[0].changes == ("mul, other 0.0 is now 0.0001",)
    assert loss[1].place == loss[0].place


def test_the_same_ops_on_other_tensors_are_found_by_their_results() -> None:
    def train(scale: bool = True) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        a, b = model(torch.ones(2, 4)).chunk(2, -1)
        if not scale:
            a, b = b, a
        (a.exp() * b).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    found = compare_ops(train, functools.partial(train, False), steps=1)
    assert found.differences == ()
    assert found.first_result is not None
    assert found.first_result.startswith("outside modules, forward (")
    assert found.first_result.endswith("): exp float32")


def test_modules_that_change_alike_are_one_difference() -> None:
    def train(kind: type[nn.Module]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4), kind())
        model(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    found = compare_ops(functools.partial(train, nn.ReLU), functools.partial(train, nn.SiLU), steps=1)
    assert [(each.phase, each.modules, each.changes) for each in found.differences] == [
        ("forward", ("1", "3"), ("relu float32 replaced by silu float32",)),
        ("backward", ("3", "1"), ("threshold_backward float32 replaced by silu_backward float32",)),
    ]


def test_how_tensors_come_from_the_workers_of_a_data_loader_is_no_op() -> None:
    """They come as memory, which is put into tensors whenever it comes."""

    def train() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(torch.arange(64.0).view(16, 4), batch_size=4, num_workers=1):  # type: ignore[arg-type]
            model(batch).square().mean().backward()
            optimizer.step()

    names = [call.name for call in measure(train, Plan("ops", 2)).ops]
    assert names.count("addmm") == 2
    assert "set_" not in names


def call(name: str, *, inputs: str = "float32", results: str = "float32", digest: str = "", **settings: str) -> OpCall:
    return OpCall(name, "(2,)", (inputs,), (results,), tuple(settings.items()), "forward", Where("", "x.py:1"), digest)


def test_ops_are_aligned_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs in a module of thousands of ops would otherwise take quadratic time."""
    before = [call(f"op{number}") for number in range(60)]
    now = [each for number, each in enumerate(before) if number % 10 != 5]
    found = differences(before, now).differences
    assert found[0].changes == tuple(f"gone: op{number} float32" for number in range(5, 60, 10))
    lengths: list[int] = []

    class Matcher(difflib.SequenceMatcher[Any]):
        def __init__(self, junk: None, a: list[Any], b: list[Any], *, autojunk: bool) -> None:
            lengths.append(max(len(a), len(b)))
            super().__init__(junk, a, b, autojunk=autojunk)

    monkeypatch.setattr(difflib, "SequenceMatcher", Matcher)
    monkeypatch.setattr(_ops, "_WINDOW", 12)
    assert differences(before, now).differences == found
    assert differences(before, before[::-1]).now == 60
    assert max(lengths) == 12


@pytest.mark.parametrize(
    ("gone", "come", "change", "rounds_more"),
    [
        ([], [call("exp")], "new: exp float32", False),
        ([call("exp")] * 2, [], "gone: 2 x exp float32", False),
        ([call("exp")], [call("mul"), call("add")], "exp float32 replaced by mul float32, add float32", False),
        ([], [call("to", results="bfloat16")], "new: to float32 -> bfloat16", True),
        ([call("exp")], [call("exp", inputs="float16", results="float16")], "exp float32 is now float16", True),
        ([call("exp", results="bfloat16")], [call("exp")], "exp float32 -> bfloat16 is now float32", False),
        ([call("sum", dim="1")], [call("sum")], "sum, dim 1 is now not set", False),
        ([], [call(name) for name in "abcdef"], "new: a float32, b float32, c float32, d float32, ... 2 more", False),
    ],
)
def test_changes_are_described(gone: list[OpCall], come: list[OpCall], change: str, rounds_more: bool) -> None:
    around = [call("first")], [call("last", digest="other")]
    found = differences([*around[0], *gone, call("last")], [*around[0], *come, *around[1]])
    (difference,) = found.differences
    assert (difference.changes, difference.rounds_more) == ((change,), rounds_more)
    assert str(difference).startswith(f"the model, forward (x.py:1): {change}")
    assert found.first_result == "the model, forward (x.py:1): last float32"


def test_long_lists_are_cut() -> None:
    now = [call(str(i), n=str(i))._replace(where=Where(str(i), f"x.py:{i}")) for i in range(30)]
    lines = differences([], now).lines()
    assert len(lines) == 23
    assert lines[-2] == "  ... and 10 more"


def test_less_than_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        compare_ops(program(), program(), steps=0)


def test_differences_are_in_the_order_of_the_program() -> None:
    before = [call(name)._replace(where=Where(name, f"x.py:{name}")) for name in "abc"]
    now = [before[0], before[2]._replace(name="d")]
    assert [difference.place for difference in differences(before, now).differences] == ["x.py:b", "x.py:c"]
    assert [difference.place for difference in differences(now, before).differences] == ["x.py:b", "x.py:c"]


def test_an_op_that_reads_numbers_instead_of_integers_says_so() -> None:
    def train(dtype: torch.dtype) -> None:
        torch.ones(2, dtype=dtype) / 2

    (found,) = compare_ops(functools.partial(train, torch.int64), functools.partial(train, torch.float32)).differences
    assert "div reads float32 instead of no floating-point numbers" in found.changes


def test_models_that_are_made_on_the_meta_device_are_compared() -> None:
    def train(eps: float = 1e-5) -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps))
        model = model.to_empty(device="cpu")
        for param in model.parameters():
            nn.init.ones_(param)
        model(torch.ones(2, 4))

    (found,) = compare_ops(train, functools.partial(train, 1e-6)).differences
    assert found.changes == ("native_layer_norm, eps 1e-05 is now 1e-06",)


def test_programs_that_run_no_op_here_are_refused() -> None:
    with pytest.raises(ValueError, match="neither version ran an op: processes that a program starts itself"):
        compare_ops(lambda: None, lambda: None)
