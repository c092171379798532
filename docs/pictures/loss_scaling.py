"""Draw the gradients that fp16 keeps, and how the scale moves, for explanation/loss-scaling.md.

python docs/pictures/loss_scaling.py
"""

from __future__ import annotations

import math
from typing import Any

from drawing import BLUE, GREY, ORANGE, Picture, power_of_two, result

from castwise.monitor import FP16

LOWEST, HIGHEST = -40, 16  # range of exponents shown
LEFT, BAR = 40, 11


def exponents(found: dict[str, Any]) -> Picture:
    """Draw three histograms, one below the other: fp32, fp16, fp16 with a scale."""
    shift = int(math.log2(found["scale"]))
    parts = [
        ("fp32", "in fp32", 0),
        ("fp16", "in fp16, without a scale", 0),
        ("fp16, scaled", f"in fp16, with the loss scaled by {power_of_two(shift)}", shift),
    ]
    kind = "outputs of linear layers"
    most = max(max(found["gradients"][name][kind]["by exponent"].values()) for name, _, _ in parts)
    picture = Picture(720, 520, "Histograms of the exponents of gradients in fp32, in fp16, and in fp16 with a scale")
    for place, (name, title, moved) in enumerate(parts):
        tally = found["gradients"][name][kind]
        _histogram(picture, 150 + 160 * place, title, tally, moved, most)
    return picture


def _histogram(picture: Picture, base: float, title: str, tally: dict[str, Any], moved: int, most: int) -> None:
    # Numbers above half of the smallest subnormal round up to it.
    subnormal, normal = FP16.smallest_subnormal_exponent - 1, FP16.smallest_normal_exponent
    top = math.floor(math.log2(FP16.largest)) + 1
    picture.rectangle(_x(LOWEST), base - 100, _x(subnormal) - _x(LOWEST), 100, ORANGE, 0.14)
    picture.rectangle(_x(subnormal), base - 100, _x(normal) - _x(subnormal), 100, ORANGE, 0.06)
    for exponent, count in tally["by exponent"].items():
        at = int(exponent) + moved
        if LOWEST <= at < HIGHEST:
            height = 78 * count / most
            picture.rectangle(_x(at) + 1, base - height, BAR - 2, height, BLUE)
    picture.line([(LEFT, base), (_x(HIGHEST) + 8, base)], opacity=0.6)
    picture.line([(_x(top), base), (_x(top), base - 100)], dashes="4 3", opacity=0.6)
    picture.text(LEFT, base - 108, title, size=14)
    picture.text(_x(HIGHEST), base - 108, f"zero: {tally['share of zeros']:.2%}", anchor="end", colour=GREY)
    if base == 150:
        picture.text((_x(LOWEST) + _x(subnormal)) / 2, base - 86, "fp16 makes these zero", anchor="middle", size=12)
        picture.text((_x(subnormal) + _x(normal)) / 2, base - 86, "subnormal", anchor="middle", size=12)
        picture.text(_x(top) - 6, base - 86, "overflow", anchor="end", size=12)
    for exponent in range(LOWEST, HIGHEST + 1, 8):
        picture.text(_x(exponent), base + 16, power_of_two(exponent), anchor="middle", size=12)


def _x(exponent: int) -> float:
    return LEFT + BAR * (exponent - LOWEST)


def scale(run: dict[str, Any]) -> Picture:
    """Draw the scale at each step, and mark skipped steps."""
    scales = run["scales"]
    low, high = (int(math.log2(bound(scales))) for bound in (min, max))
    picture = Picture(
        720, 230, "The scale of each step: it doubles after a run of good steps, and halves at an overflow"
    )

    def x(step: float) -> float:
        return 60 + 640 * step / len(scales)

    def y(exponent: float) -> float:
        return 180 - 120 * (exponent - low + 0.5) / (high - low + 1)

    for exponent in range(low, high + 1):
        picture.line([(60, y(exponent)), (700, y(exponent))], opacity=0.15)
        picture.text(52, y(exponent) + 4, power_of_two(exponent), anchor="end")
    points = []
    for step, each in enumerate(scales):
        points += [(x(step), y(math.log2(each))), (x(step + 1), y(math.log2(each)))]
    picture.line(points, BLUE, 2)
    for step in run["skipped"]:
        picture.dot(x(step - 0.5), y(math.log2(scales[step - 1])), 4.5, ORANGE)
    picture.line([(60, 180), (700, 180)], opacity=0.6)
    every = max(1, len(scales) // 6)
    for step in range(0, len(scales) + 1, every):
        picture.text(x(step), 198, str(step), anchor="middle", size=12)
    picture.text(380, 218, "step", anchor="middle", size=12)
    picture.line([(64, 22), (88, 22)], BLUE, 2)
    picture.text(94, 26, "scale")
    picture.dot(156, 22, 4.5, ORANGE)
    picture.text(166, 26, "skipped: a gradient overflowed")
    return picture


def pictures() -> dict[str, Picture]:
    """Return the pictures of the committed result."""
    found = result("gradient_exponents-cpu")
    return {"gradient-exponents": exponents(found), "moving-scale": scale(found["run"])}


if __name__ == "__main__":
    for name, picture in pictures().items():
        picture.write(name)
