"""Draw number formats for explanation/number-formats.md, computed from their definitions.

python docs/pictures/number_formats.py
"""

from __future__ import annotations

import math

from drawing import BLUE, GREEN, GREY, ORANGE, Picture, power_of_two

from castwise.monitor import BF16, E4M3, E5M2, FP16, FP32, Format

SHOWN = (FP32, BF16, FP16, E5M2, E4M3)
# From the OCP Microscaling specification. Its largest number is 6, because it has neither inf nor NaN.
E2M1 = Format("e2m1", exponent_bits=2, mantissa_bits=1, has_infinity=False)


def bits(formats: tuple[Format, ...] = (*SHOWN, E2M1)) -> Picture:
    """Draw the bit layout of each format."""
    picture = Picture(720, 46 + 34 * len(formats), "The bits of each format: sign, exponent and mantissa")
    for place, (colour, word) in enumerate(
        ((GREY, "sign"), (ORANGE, "exponent: range"), (BLUE, "mantissa: precision"))
    ):
        picture.rectangle(70 + 160 * place, 8, 14, 14, colour)
        picture.text(90 + 160 * place, 20, word)
    for row, each in enumerate(formats):
        y = 38 + 34 * row
        picture.text(60, y + 18, each.name, anchor="end")
        colours = [GREY] + [ORANGE] * each.exponent_bits + [BLUE] * each.mantissa_bits
        for bit, colour in enumerate(colours):
            picture.rectangle(70 + 20 * bit, y, 18, 26, colour)
    return picture


def ranges(formats: tuple[Format, ...] = SHOWN) -> Picture:
    """Draw the range of each format on an axis of powers of two."""
    lowest = min(each.smallest_subnormal_exponent for each in formats)
    highest = max(math.log2(each.largest) for each in formats)
    left, width = 62, 640
    height = 62 + 40 * len(formats)
    picture = Picture(720, height, "The range of each format: from its smallest subnormal number to its largest")

    def x(exponent: float) -> float:
        return left + width * (exponent - lowest) / (highest - lowest)

    picture.rectangle(62, 8, 14, 14, BLUE)
    picture.text(82, 20, "normal numbers, with full precision")
    picture.rectangle(322, 8, 14, 14, BLUE, 0.4)
    picture.text(342, 20, "subnormal numbers, with fewer bits")
    for row, each in enumerate(formats):
        y = 38 + 40 * row
        smallest, normal = each.smallest_subnormal_exponent, each.smallest_normal_exponent
        largest = math.log2(each.largest)
        picture.text(54, y + 15, each.name, anchor="end")
        picture.rectangle(x(smallest), y, x(normal) - x(smallest), 20, BLUE, 0.4)
        picture.rectangle(x(normal), y, x(largest) - x(normal), 20, BLUE)
        name = f"{each.largest:,.0f}" if each.largest < 1e6 else f"{each.largest:.2e}"
        if x(largest) - x(smallest) > width / 2:  # the names fit below
            picture.text(x(smallest), y + 33, power_of_two(smallest), size=12)
            picture.text(x(largest), y + 33, name, anchor="end", size=12)
        else:
            picture.text(x(smallest) - 6, y + 15, power_of_two(smallest), anchor="end", size=12)
            picture.text(x(largest) + 6, y + 15, name, size=12)
    base = height - 18
    picture.line([(x(0), 32), (x(0), base - 8)], dashes="4 3", opacity=0.6)
    for exponent in range(-144, 128, 24):
        picture.text(x(exponent), base + 8, power_of_two(exponent), anchor="middle", size=12)
    return picture


# Element types of the specification's section 5.3, with their smallest subnormal, smallest normal and largest number.
MX = {
    "MXFP4 (e2m1)": (0.5, 1.0, 6.0),
    "MXFP6 (e2m3)": (2.0**-3, 1.0, 7.5),
    "MXFP6 (e3m2)": (2.0**-4, 2.0**-2, 28.0),
    "MXFP8 (e4m3)": (E4M3.smallest_subnormal, E4M3.smallest_normal, E4M3.largest),
    "MXFP8 (e5m2)": (E5M2.smallest_subnormal, E5M2.smallest_normal, E5M2.largest),
}
SCALES = (-127, 127)  # exponents of E8M0
OF_A_BLOCK = -10  # exponent of the scale in the drawing


def blocks() -> Picture:
    """Draw the range of numbers in a block with a shared scale, and the range over all scales."""
    left, width = 122, 580
    lowest = SCALES[0] + min(math.log2(smallest) for smallest, _, _ in MX.values())
    highest = SCALES[1] + max(math.log2(largest) for _, _, largest in MX.values())
    height = 62 + 34 * len(MX)
    picture = Picture(720, height, f"The numbers of a block at scale 2^{OF_A_BLOCK}, and those at all scales")

    def x(exponent: float) -> float:
        return left + width * (exponent - lowest) / (highest - lowest)

    words = (BLUE, 1.0, "normal"), (BLUE, 0.4, "subnormal, in a block at scale"), (GREY, 0.3, "at some other scale")
    for (colour, opacity, word), at in zip(words, (122, 202, 462), strict=True):
        picture.rectangle(at, 8, 14, 14, colour, opacity)
        picture.text(at + 20, 20, f"{word} {power_of_two(OF_A_BLOCK)}" if "at scale" in word else word)
    for row, (name, numbers) in enumerate(MX.items()):
        y = 38 + 34 * row
        smallest, normal, largest = map(math.log2, numbers)
        picture.text(114, y + 15, name, anchor="end")
        picture.rectangle(x(SCALES[0] + smallest), y, x(SCALES[1] + largest) - x(SCALES[0] + smallest), 20, GREY, 0.3)
        start, middle, end = (x(OF_A_BLOCK + exponent) for exponent in (smallest, normal, largest))
        picture.rectangle(start, y, middle - start, 20, BLUE, 0.4)
        picture.rectangle(middle, y, end - middle, 20, BLUE)
    for exponent in range(-120, 121, 40):
        picture.text(x(exponent), height - 8, power_of_two(exponent), anchor="middle", size=12)
    return picture


def positive(each: Format, up_to: float) -> list[float]:
    """Return the numbers of a format from 0 to a bound."""
    step = 2.0**-each.mantissa_bits
    numbers = [mantissa * step * each.smallest_normal for mantissa in range(2**each.mantissa_bits)]
    for exponent in range(each.smallest_normal_exponent, math.floor(math.log2(up_to)) + 1):
        numbers += [(1 + mantissa * step) * 2.0**exponent for mantissa in range(2**each.mantissa_bits)]
    return [each for each in numbers if each <= up_to]


def spacing(formats: tuple[Format, ...] = (E4M3, E5M2, E2M1)) -> Picture:
    """Draw each number of a format between 0 and 6 as a tick."""
    up_to, left, width = 6.0, 62, 640
    picture = Picture(720, 60 + 46 * len(formats), "The numbers that each format has between 0 and 6")
    for row, each in enumerate(formats):
        y = 12 + 46 * row
        picture.text(54, y + 18, each.name, anchor="end")
        for number in positive(each, up_to):
            at = left + width * number / up_to
            colour = ORANGE if number < each.smallest_normal else (GREEN if math.log2(number) % 1 == 0 else BLUE)
            picture.line([(at, y), (at, y + 28)], colour, 1.6)
    base = 60 + 46 * len(formats) - 28
    for whole in range(int(up_to) + 1):
        picture.text(left + width * whole / up_to, base, str(whole), anchor="middle", size=12)
    for place, (colour, word) in enumerate(
        ((GREEN, "power of two"), (BLUE, "between"), (ORANGE, "zero and subnormal"))
    ):
        picture.rectangle(62 + 150 * place, base + 10, 12, 12, colour)
        picture.text(80 + 150 * place, base + 20, word, size=12)
    return picture


def pictures() -> dict[str, Picture]:
    """Return the pictures of the formats."""
    return {"format-bits": bits(), "format-ranges": ranges(), "format-spacing": spacing(), "format-blocks": blocks()}


if __name__ == "__main__":
    for name, picture in pictures().items():
        picture.write(name)
