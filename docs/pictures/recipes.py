"""Draw the scale groups, errors and learning curves of 8- and 4-bit recipes, for explanation/recipes.md.

python docs/pictures/recipes.py
"""

from __future__ import annotations

from typing import Any

import torch
from drawing import BLUE, GREEN, GREY, ORANGE, PINK, Picture, result

from castwise._recipes.scalings import E4M3, E5M2, Float8, Nvfp4, Scaling

LEFT, RIGHT = 62, 700
SIDE = 128  # pixels of an operand of 256 x 256 elements
GROUPS = {
    "tensorwise": (256, 256),
    "rowwise": (1, 256),
    "blockwise, input": (1, 128),
    "blockwise, weight": (128, 128),
    "mxfp8": (1, 32),
    "nvfp4": (1, 16),
}
FORMATS: dict[str, tuple[str, Scaling]] = {
    "e4m3 (float8, mxfp8)": (BLUE, Float8(E4M3, (1, None))),
    "e5m2 (gradients of tensorwise)": (GREEN, Float8(E5M2, (1, None))),
    "e2m1 (nvfp4)": (ORANGE, Nvfp4()),
}
BITS_BELOW = 36
COLOURS = {
    "float8_tensorwise": GREEN,
    "float8_rowwise": BLUE,
    "float8_rowwise_with_gw_hp": PINK,
    "float8_blockwise": GREY,
    "mxfp8": "currentColor",
    "nvfp4": ORANGE,
}


def groups() -> Picture:
    """Draw which elements of an operand share a scale."""
    picture = Picture(720, 2 * (SIDE + 62), "Which elements of an operand of 256 x 256 share a scale, by recipe")
    for place, (name, (rows, columns)) in enumerate(GROUPS.items()):
        x, y = 30 + 236 * (place % 3), 22 + (SIDE + 62) * (place // 3)
        cell = SIDE / 256
        picture.rectangle(x, y, SIDE, SIDE, GREY, 0.25)
        # Rows are too thin to draw, so one line stands for 24.
        height = max(rows * cell, SIDE / 24)
        top = y + (0 if rows > 1 else SIDE / 24 * 5)
        picture.rectangle(x, top, columns * cell, height, BLUE)
        picture.text(x, y - 7, name)
        shared = "all elements" if rows == 256 else f"{rows} x {columns}"
        picture.text(x, y + SIDE + 18, f"a scale for {shared}", size=12)
    return picture


def kept(scaling: Scaling, bits: int) -> float:
    """Return the RMS relative error of numbers that are `bits` below the largest number of their group."""
    generator = torch.Generator().manual_seed(bits)
    operand = (1 + torch.rand(512, 16, generator=generator)) * 2.0**-bits
    operand[:, 0] = 1.0  # in each group
    numbers = scaling.dequantize_(scaling.quantize(operand))
    return float(((numbers - operand) / operand)[:, 1:].square().mean().sqrt())


def errors() -> Picture:
    """Draw the relative error of numbers by their distance below the largest number of their group."""
    top, bottom = 46, 270
    picture = Picture(720, bottom + 46, "Relative error of numbers, by their distance to the largest of their group")

    def x(bits: float) -> float:
        return LEFT + (RIGHT - LEFT) * bits / BITS_BELOW

    def y(error: float) -> float:
        return bottom - (bottom - top) * min(error, 1.0)

    for place, (name, (colour, _)) in enumerate(FORMATS.items()):
        picture.rectangle(LEFT + 225 * place, 10, 14, 14, colour)
        picture.text(LEFT + 20 + 225 * place, 22, name, size=12)
    for share in range(0, 101, 25):
        picture.line([(LEFT, y(share / 100)), (RIGHT, y(share / 100))], opacity=0.6 if share == 0 else 0.15)
        picture.text(LEFT - 8, y(share / 100) + 4, f"{share}%", anchor="end", size=12)
    for colour, scaling in FORMATS.values():
        points = [(x(bits), y(kept(scaling, bits))) for bits in range(1, BITS_BELOW + 1)]
        picture.line(points, colour, 2.0)
    for bits in range(0, BITS_BELOW + 1, 5):
        picture.text(x(bits), bottom + 18, str(bits), anchor="middle", size=12)
    words = "bits below the largest number that shares the scale; at 100%, a number becomes zero"
    picture.text((LEFT + RIGHT) / 2, bottom + 38, words, anchor="middle", size=12)
    return picture


def learning(methods: dict[str, Any], steps: int) -> Picture:
    """Draw the training loss of each recipe minus that of bf16, in means of 25 steps."""
    key = "training loss, means of 25 steps"
    curves = {
        name: [loss - of_bf16 for loss, of_bf16 in zip(methods[name][key], methods["bf16"][key], strict=True)]
        for name in COLOURS
    }
    top, bottom = 66, 290
    lowest, highest = min(0.0, *map(min, curves.values())), max(map(max, curves.values()))
    picture = Picture(720, bottom + 46, "Training loss by recipe, minus that of bf16")

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / steps

    def y(gap: float) -> float:
        return bottom - (bottom - top) * (gap - lowest) / (highest - lowest)

    for place, (name, colour) in enumerate(COLOURS.items()):
        at, line = LEFT + 215 * (place % 3), 10 + 22 * (place // 3)
        picture.rectangle(at, line, 14, 14, colour)
        picture.text(at + 20, line + 12, name, size=12)
    grid = next(each for each in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2) if (highest - lowest) / each <= 6)
    for times in range(int(lowest / grid), int(highest / grid) + 1):
        picture.line([(LEFT, y(times * grid)), (RIGHT, y(times * grid))], opacity=0.15 if times else 0.6)
        picture.text(LEFT - 8, y(times * grid) + 4, f"{times * grid:+g}" if times else "bf16", anchor="end", size=12)
    for name, curve in curves.items():
        picture.line([(x(25 * place + 12.5), y(gap)) for place, gap in enumerate(curve)], COLOURS[name], 2.0)
    for step in range(0, steps + 1, 50):
        picture.text(x(step), bottom + 18, str(step), anchor="middle", size=12)
    picture.text((LEFT + RIGHT) / 2, bottom + 38, "training step", anchor="middle", size=12)
    return picture


def pictures() -> dict[str, Picture]:
    """Return all pictures; the last one shows a committed result."""
    record = result("recipes-cpu")
    return {
        "recipe-groups": groups(),
        "recipe-errors": errors(),
        "recipe-learning": learning(record["methods"], record["steps"]),
    }


if __name__ == "__main__":
    for name, picture in pictures().items():
        picture.write(name)
