"""Formats of 8 and 4 bits: the numbers of their tables, torchao's own bits, and fp64 by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from castwise._recipes.recipe import RECIPES
from castwise._recipes.scalings import E4M3, E5M2, Float8, Mxfp8, Numbers, Nvfp4, Scaling
from castwise.monitor import _formats as formats

SCALINGS = list(
    dict.fromkeys(
        scaling for recipe in RECIPES.values() for pair in (recipe.output, recipe.grad_input) for scaling in pair
    )
)


def example(seed: int, rows: int = 128, columns: int = 128, spread: float = 4.0) -> torch.Tensor:
    """Rows of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** ((torch.rand(rows, 1, generator=generator) - 0.5) * spread)
    return torch.randn(rows, columns, generator=generator) * sizes


def kept(scaling: Scaling, operand: torch.Tensor) -> torch.Tensor:
    return scaling.dequantize_(scaling.quantize(operand))


# Table 5 of the OCP specification: e2m1 is S EE M with bias 1. Table 1 of the fp8 paper (arXiv 2209.05433): e4m3 has
# bias 7 and gives one code to NaN, e5m2 is as IEEE would have it.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def codes_of_e4m3() -> list[float]:
    numbers = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    numbers += [(1 + mantissa / 8) * 2.0 ** (code - 7) for code in range(1, 16) for mantissa in range(8)]
    return numbers[:-1]  # the last code is NaN


def nearest(number: float, table: list[float]) -> float:
    """By hand: the nearest number of a table, of two the one with the even code."""
    code = min(range(len(table)), key=lambda code: (abs(table[code] - number), code % 2))
    return table[code]


def test_e2m1_rounds_to_the_nearest_of_its_table() -> None:
    numbers = [*torch.linspace(0, 6, 16 * 61 - 1).tolist(), 6.0]
    for start in range(0, len(numbers), 15):
        block = torch.tensor([[*numbers[start : start + 15], 6.0]])
        block = torch.nn.functional.pad(block, (16 - block.shape[1], 0))
        # 6 * 448 elsewhere makes the scale of all 1, and that of this block 1.
        both = torch.cat([block, torch.full((1, 16), 6.0 * 448.0)])
        quantized = Nvfp4().quantize(both)
        assert quantized.scale[0, 0].item() == 1.0
        assert quantized.values[0].float().tolist() == [nearest(number, E2M1) for number in block[0].tolist()]


def test_e4m3_rounds_to_the_nearest_of_its_table() -> None:
    table = codes_of_e4m3()
    assert max(table) == 448.0
    numbers = [(low + (high - low) * part) for low, high in itertools.pairwise(table) for part in (0, 0.4, 0.5, 0.9)]
    for start in range(0, len(numbers), 31):
        block = torch.tensor([[*numbers[start : start + 31], 448.0]])
        block = torch.nn.functional.pad(block, (32 - block.shape[1], 0))
        quantized = Mxfp8().quantize(block)
        assert quantized.scale.item() == 1.0
        assert quantized.values[0].float().tolist() == [nearest(number, table) for number in block[0].tolist()]


@pytest.mark.parametrize("exponent", [-120, -30, -1, 0, 7, 100])
def test_the_scale_of_an_mx_block_is_the_least_power_of_two_that_saturates_nothing(exponent: int) -> None:
    for largest, expected in ((448.0, exponent), (449.0, exponent + 1), (225.0, exponent), (224.0, exponent - 1)):
        block = torch.zeros(1, 32)
        block[0, 3] = -largest * 2.0**exponent
        assert Mxfp8().quantize(block).scale.item() == 2.0**expected


def test_scales_of_mx_blocks_have_eight_bits() -> None:
    tiny, huge = torch.full((1, 32), 1e-44), torch.full((1, 32), 3e38)
    assert Mxfp8().quantize(tiny).scale.item() == 2.0**-127
    assert Mxfp8().quantize(huge).scale.item() == 2.0 ** math.ceil(math.log2(3e38 / 448))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mx_and_nvfp4_have_the_bits_of_torchao(dtype: torch.dtype) -> None:
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    mode = mx_tensor.ScaleCalculationMode.RCEIL
    for seed in range(20):
        operand = example(seed).to(dtype)
        theirs, ours = mx_tensor.MXTensor.to_mx(operand, torch.float8_e4m3fn, 32, mode), Mxfp8().quantize(operand)
        assert torch.equal(theirs.qdata.float(), ours.values)
        assert torch.equal(theirs.scale.view(torch.uint8).float() - 127, torch.log2(ours.scale[..., 0]))
        of_all = nvfp4.per_tensor_amax_to_scale(operand.abs().max())
        theirs = nvfp4.NVFP4Tensor.to_nvfp4(operand, per_tensor_scale=of_all)
        assert torch.equal(theirs.dequantize(torch.float32), kept(Nvfp4(), operand))


def by_hand(operand: torch.Tensor, rows: int, columns: int, largest: float) -> torch.Tensor:
    """The scale of each element in fp64, of blocks of so many rows and columns, repeated for each element."""
    scales = torch.empty(operand.shape, dtype=torch.float64)
    for row in range(0, operand.shape[0], rows):
        for column in range(0, operand.shape[1], columns):
            block = operand[row : row + rows, column : column + columns].double()
            scales[row : row + rows, column : column + columns] = largest / block.abs().max()
    return scales


@pytest.mark.parametrize("block", [(None, None), (1, None), (1, 128), (128, 128)])
@pytest.mark.parametrize("numbers", [E4M3, E5M2], ids=str)
def test_blocks_are_scaled_so_that_the_largest_number_becomes_the_largest_of_the_format(
    block: tuple[int | None, int | None], numbers: Numbers
) -> None:
    operand = example(1, 256, 256)
    scaling = Float8(numbers, block)
    quantized = scaling.quantize(operand)
    values = quantized.values.double()
    scales = by_hand(operand, block[0] or 256, block[1] or 256, numbers.largest)
    steps = 2.0 ** -(numbers.mantissa_bits + 1)  # half a unit in the last place
    smallest = numbers.smallest_normal * steps  # half of the distance of subnormal numbers
    error = (values - operand.double() * scales).abs()
    assert (error <= ((operand.double() * scales).abs() * steps).clamp(min=smallest) * 1.0001).all()
    assert torch.allclose(scaling.dequantize_(quantized).double(), values / scales, rtol=1e-6)
    by_2 = Float8(numbers, block, power_of_2=True).quantize(operand).scale
    assert torch.equal(torch.log2(by_2), torch.floor(torch.log2(quantized.scale)))


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_zeros_stay_zeros(scaling: Scaling) -> None:
    quantized = scaling.quantize(torch.zeros(128, 128))
    assert torch.isfinite(quantized.scale).all()
    assert (scaling.dequantize_(quantized) == 0).all()


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_nan_reaches_all_that_share_its_scale(scaling: Scaling) -> None:
    operand = torch.ones(256, 256)
    operand[0, 0] = math.nan
    numbers = kept(scaling, operand)
    assert numbers[0, 0].isnan()
    share = {(None, None): 256 * 256, (1, None): 256, (1, 128): 128, (128, 128): 128 * 128}
    blocks = {Mxfp8: 32, Nvfp4: 256 * 256}  # NaN is the scale of all, too
    expected = share[scaling.block] if isinstance(scaling, Float8) else blocks[type(scaling)]
    assert numbers.isnan().sum().item() == expected


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_a_transposed_operand_is_quantized_as_its_copy(scaling: Scaling) -> None:
    operand = example(2, 256, 128).t()
    assert torch.equal(kept(scaling, operand), kept(scaling, operand.contiguous()))


def test_numbers_are_lost_as_the_format_says() -> None:
    """The relative errors of e4m3, e5m2 and e2m1 are at most 2**-4, 2**-3 and 2**-2 of a number in range."""
    operand = example(3, spread=0.0) + 3.0
    for scaling, bound in ((Float8(E4M3, (1, None)), 2**-4), (Float8(E5M2, (1, None)), 2**-3), (Mxfp8(), 2**-4)):
        large = operand.abs() > operand.abs().amax() / 64
        error = ((kept(scaling, operand) - operand) / operand)[large].abs().max().item()
        assert bound / 3 < error <= bound * 1.001


def test_formats_are_those_that_monitors_judge() -> None:
    for numbers, known in ((E4M3, formats.E4M3), (E5M2, formats.E5M2)):
        assert numbers[:4] == (known.name, known.mantissa_bits, known.smallest_normal, known.largest)
