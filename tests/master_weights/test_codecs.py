"""What 16-bit weights and the bits beside them hold of fp32 numbers, bit by bit."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from castwise.master_weights import _codecs as codecs
from castwise.master_weights._codecs import Chance, Codec, codec_of, round_by_chance

CPU = torch.device("cpu")


def codec(length: int, dtype: Any = torch.bfloat16) -> Codec:
    return codec_of("split", dtype, length, CPU, chance=Chance(0), stream="weights")


def round_trip(of: Codec, values: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    weights = torch.empty(len(values), dtype=dtype)
    of.encode(values.clone(), weights)
    return weights, of.decode(weights, torch.empty_like(values)).clone()


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16 if values.dtype.itemsize == 2 else torch.int32)


@pytest.fixture(scope="module")
def numbers() -> torch.Tensor:
    """All upper halves with lower halves at the boundaries: 65,536 x 12 numbers, NaN and inf among them."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF, 0x1234, 0xABCD]
    every = torch.cat([upper | each for each in lower])
    return torch.where(every >= 1 << 31, every - (1 << 32), every).to(torch.int32).view(torch.float32)


@pytest.fixture(params=["listed ties", "packed ties"])
def split(request: pytest.FixtureRequest, numbers: torch.Tensor) -> Any:
    """The codec, as it is on a CPU and as on an accelerator."""
    even: Any = codec(len(numbers))
    if request.param == "packed ties":
        even._ties = codecs._PackedTies(len(numbers), CPU)
    return even


def test_split_gives_back_every_number_and_rounds_as_torch_does(split: Any, numbers: torch.Tensor) -> None:
    weights, decoded = round_trip(split, numbers)
    is_number = ~numbers.isnan()
    assert torch.equal(bits(decoded)[is_number], bits(numbers)[is_number])
    assert torch.equal(bits(weights)[is_number], bits(numbers.bfloat16())[is_number])
    assert decoded[~is_number].isnan().all()
    assert weights[~is_number].isnan().all()


def test_a_tie_is_lost_without_its_note(split: Any, numbers: torch.Tensor) -> None:
    weights, _ = round_trip(split, numbers)
    split._ties = codecs._PackedTies(len(numbers), CPU)
    decoded = split.decode(weights, torch.empty_like(numbers))
    wrong = bits(decoded) != bits(numbers)
    assert (bits(numbers)[wrong & ~numbers.isnan()] & 0x1FFFF == 0x8000).all()
    assert wrong.sum() >= 1 << 14


@pytest.mark.parametrize("length", [1, 7, 8, 9, 1023, 1024, 1025, 5000])
def test_parts_are_saved_and_loaded_at_any_length(length: int) -> None:
    values = torch.full((length,), 1.00390625)  # a tie that is rounded down
    values[::3] = 0.1
    for packed in (False, True):
        one: Any = codec(length)
        other: Any = codec(length)
        if packed:
            one._ties, other._ties = (codecs._PackedTies(length, CPU) for _ in range(2))
        weights, _ = round_trip(one, values)
        middle = length // 2
        for begin, end in ((middle, length), (0, middle)):
            other.load(begin, end, one.saved(begin, end))
        assert torch.equal(other.decode(weights, torch.empty(length)), values)
        assert one.saved(0, length)["ties"].dtype is torch.bool


def test_packed_ties_take_a_bit_a_weight_and_listed_ones_what_there_is() -> None:
    assert codecs._PackedTies(8000, CPU).bytes() == 1000
    listed = codec(1 << 16)
    listed.encode(torch.randn(1 << 16), torch.empty(1 << 16, dtype=torch.bfloat16))
    assert listed.bytes() <= 2 * (1 << 16) + 8 * 16


def test_half_is_exact_from_two_to_the_minus_16_to_65504(numbers: torch.Tensor) -> None:
    weights, decoded = round_trip(codec(len(numbers), dtype=torch.float16), numbers, torch.float16)
    magnitude = numbers.abs()
    exact = (magnitude >= 2.0**-16) & (magnitude <= 65504)
    assert torch.equal(bits(decoded)[exact], bits(numbers)[exact])
    assert torch.equal(weights[exact], numbers[exact].half())
    small = magnitude < 2.0**-16
    assert (decoded - numbers)[small].abs().amax() <= 2.0**-40
    assert torch.equal(decoded[numbers.isinf()], numbers[numbers.isinf()])
    assert decoded[numbers.isnan()].isnan().all()
    large = (magnitude > 65504) & numbers.isfinite()
    assert weights[large].abs().eq(65504).all()
    assert torch.equal(decoded[large].sign(), numbers[large].sign())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chance_is_right_on_average_and_leaves_what_the_format_holds(dtype: torch.dtype) -> None:
    chance = Chance(5)
    for value in (0.3, -3.3e-6, 1000.1, 65000.0):
        values = torch.full((1 << 20,), value)
        rounded = chance.round(values, dtype, "weights")
        assert torch.equal(rounded, rounded.to(dtype).float())
        assert len(rounded.unique()) == 2
        # Of n draws the mean is off by a step / (2 sqrt(n)), or less.
        spacing = float(rounded.amax() - rounded.amin())
        assert abs(rounded.double().mean().item() - values[0].item()) < 5 * spacing / (2 * 2**10)
    held = torch.cat([torch.randn(1 << 16).to(dtype).float(), torch.tensor([math.inf, -math.inf, 0.0])])
    assert torch.equal(chance.round(held, dtype, "weights"), held)
    nan = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert round_by_chance(nan, torch.full((3,), 0xFFFF, dtype=torch.int32), dtype).isnan().all()


def test_random_bits_are_even_and_depend_on_seed_stream_step_and_place() -> None:
    draws = {}
    for key in itertools.product((1, 2), ("a", "b"), (0, 1, 2)):
        chance = Chance(key[0])
        chance.taken = key[2]
        draws[key] = chance.words(1 << 18, CPU, key[1]) >> 16 & 0xFFFF
    one = draws[1, "a", 0]
    for other in draws.values():
        for shift in (0, 1, 2, 7, 1 << 16):  # neither the same bits, nor those of a neighbour
            if other is not one or shift:
                same = (one[: len(one) - shift] == other[shift:]).float().mean().item()
                assert same < 1e-3
        for bit in range(16):
            assert abs((other >> bit & 1).float().mean().item() - 0.5) < 0.01
        cells = torch.bincount(other >> 8, minlength=256).double()
        assert cells.std() < 3 * math.sqrt(len(other) / 256)


def test_neighbours_draw_independently_and_steps_cover_the_range() -> None:
    chance, draws = Chance(0), []
    for step in range(500):
        chance.taken = step
        draws.append(chance.words(1 << 12, CPU, "weights").double() / 2**31)  # in [-1, 1)
    numbers = torch.stack(draws)
    assert numbers.mean(0).abs().amax() < 0.02  # 0.026 is the standard deviation of 500 independent ones
    in_a_step = torch.corrcoef(torch.stack([numbers[0].roll(shift) for shift in range(64)]))[0, 1:]
    assert in_a_step.abs().amax() < 4.5 / math.sqrt(1 << 12)


def test_chance_moves_on_with_steps_that_are_taken() -> None:
    values = torch.full((1000,), 0.3)
    chance = Chance(3)
    first = chance.round(values, torch.bfloat16, "a")
    assert not torch.equal(first, chance.round(values, torch.bfloat16, "b"))
    chance.count(CPU, torch.ones(()))  # skipped
    assert torch.equal(first, chance.round(values, torch.bfloat16, "a"))
    chance.count(CPU)
    second = chance.round(values, torch.bfloat16, "a")
    assert not torch.equal(first, second)
    assert chance.steps() == 1
    again = Chance(0)
    again.set(3, 1)
    assert torch.equal(second, again.round(values, torch.bfloat16, "a"))


def test_steps_that_several_devices_have_counted_are_added() -> None:
    counted, expected = Chance(3), Chance(3)
    counted._taken_on = {CPU: torch.tensor(2), torch.device("cpu", 0): torch.tensor(3)}
    expected.taken = 5
    assert counted.steps() == 5
    values = torch.rand(64)
    rounded = counted.round(values, torch.bfloat16, "weights")
    assert torch.equal(rounded, expected.round(values, torch.bfloat16, "weights"))
