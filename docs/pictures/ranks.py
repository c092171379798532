"""Draw ranks that drift apart, and the cost of agreement on many ranks, for explanation/why-ranks-must-agree.md.

python docs/pictures/ranks.py
"""

from __future__ import annotations

import math
from typing import Any

from drawing import BLUE, GREEN, GREY, ORANGE, PINK, Picture, power_of_two, result

WINDOW = 10  # steps that losses are averaged over


def apart(ranks: dict[str, list[list[dict[str, Any]]]]) -> Picture:
    """Draw the scale of each rank with both libraries, and the losses below."""
    picture = Picture(720, 440, "The scales of two ranks and their mean loss, under torch and under castwise")
    steps = len(ranks["torch"][0])

    def x(step: float) -> float:
        return 60 + 640 * step / steps

    exponents = [[[math.log2(step["scale"]) for step in of_rank] for of_rank in each] for each in ranks.values()]
    low, high = (bound(e for each in exponents for of_rank in each for e in of_rank) for bound in (min, max))

    def scale_y(exponent: float) -> float:
        return 190 - 130 * (exponent - low) / max(high - low, 1)

    for exponent in range(int(low), int(high) + 1, 4):
        picture.line([(60, scale_y(exponent)), (700, scale_y(exponent))], opacity=0.15)
        picture.text(52, scale_y(exponent) + 4, power_of_two(exponent), anchor="end", size=12)
    lines = [("torch, rank 0", ORANGE, 2.0), ("torch, rank 1", PINK, 2.0), ("castwise, both ranks", BLUE, 5.0)]
    ordered = [*exponents[list(ranks).index("torch")], exponents[list(ranks).index("castwise")][0]]
    for (_, colour, width), of_rank in reversed(list(zip(lines, ordered, strict=True))):
        opacity = 0.5 if width > 2 else 1.0
        stairs = [(x(at), scale_y(each)) for step, each in enumerate(of_rank) for at in (step, step + 1)]
        picture.line(stairs, colour, width, opacity)
    for place, (name, colour, width) in enumerate(lines):
        picture.line([(160 + 160 * place, 22), (184 + 160 * place, 22)], colour, width, 0.5 if width > 2 else 1.0)
        picture.text(190 + 160 * place, 26, name, size=12)
    picture.text(60, 26, "scale", size=14)
    means = {library: _smoothed(_losses(of_ranks)) for library, of_ranks in ranks.items()}
    logs = {library: [math.log2(loss) for loss in each] for library, each in means.items()}
    least, most = (bound(log for each in logs.values() for log in each) for bound in (min, max))

    def loss_y(log: float) -> float:
        return 380 - 120 * (log - least) / max(most - least, 1e-9)

    picture.text(60, 236, f"loss over both ranks, mean of {WINDOW} steps", size=14)
    for exponent in range(math.ceil(least), math.floor(most) + 1):
        picture.line([(60, loss_y(exponent)), (700, loss_y(exponent))], opacity=0.15)
        picture.text(52, loss_y(exponent) + 4, f"{2.0**exponent:.3g}", anchor="end", size=12)
    picture.line([(60, 392), (700, 392)], opacity=0.6)
    for place, (library, colour) in enumerate((("torch", ORANGE), ("castwise", BLUE))):
        picture.line([(x(step + WINDOW), loss_y(log)) for step, log in enumerate(logs[library])], colour, 2)
        picture.line([(400 + 90 * place, 232), (424 + 90 * place, 232)], colour, 2)
        picture.text(430 + 90 * place, 236, library, size=12)
    for step in range(0, steps + 1, max(1, steps // 6)):
        picture.text(x(step), 408, str(step), anchor="middle", size=12)
    picture.text(380, 430, "step", anchor="middle", size=12)
    return picture


def _losses(of_ranks: list[list[dict[str, Any]]]) -> list[float]:
    return [sum(step["loss"] for step in of_step) / len(of_step) for of_step in zip(*of_ranks, strict=True)]


def _smoothed(values: list[float]) -> list[float]:
    return [sum(values[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(values) + 1)]


def hops_of_tree(ranks: int) -> int:
    """Return the hops up a binary tree and down again."""
    return 2 * math.ceil(math.log2(ranks))


def hops_of_ring(ranks: int) -> int:
    """Return the hops around a ring, for the sum and for its distribution."""
    return 2 * (ranks - 1)


def model() -> Picture:
    """Draw the time of a 16-byte all-reduce in the alpha-beta model, with logarithmic axes."""
    picture = Picture(720, 380, "Time of a small all-reduce by number of ranks, of a tree and of a ring: a model")
    counts = [2**power for power in range(1, 18)]

    def x(ranks: float) -> float:
        return 80 + 600 * math.log2(ranks) / 17

    def y(seconds: float) -> float:
        return 320 - 280 * (math.log10(seconds) + 6) / 7

    for power, name in zip(
        range(-6, 2), ("1 us", "10 us", "100 us", "1 ms", "10 ms", "100 ms", "1 s", "10 s"), strict=True
    ):
        picture.line([(80, y(10.0**power)), (680, y(10.0**power))], opacity=0.15)
        picture.text(72, y(10.0**power) + 4, name, anchor="end", size=12)
    for alpha, colour in ((2e-6, GREEN), (5e-6, BLUE), (20e-6, ORANGE)):
        for hops, dashes in ((hops_of_tree, ""), (hops_of_ring, "5 4")):
            picture.line([(x(ranks), y(alpha * hops(ranks))) for ranks in counts], colour, 2, dashes=dashes)
        picture.text(
            x(counts[-1]) + 6, y(alpha * hops_of_tree(counts[-1])) + 4, f"{alpha * 1e6:.0f} us", size=12, colour=colour
        )
    picture.line([(80, 320), (680, 320)], opacity=0.6)
    for ranks in (2, 16, 128, 1024, 8192, 65536):
        picture.text(x(ranks), 338, f"{ranks:,}", anchor="middle", size=12)
    picture.text(380, 362, "ranks", anchor="middle", size=12)
    picture.line([(96, 26), (126, 26)], GREY, 2)
    picture.text(132, 30, "tree")
    picture.line([(176, 26), (206, 26)], GREY, 2, dashes="5 4")
    picture.text(212, 30, "ring; colours: time of one hop")
    return picture


def pictures() -> dict[str, Picture]:
    """Return the pictures of the committed result and of the model."""
    return {"ranks-apart": apart(result("ranks_apart-cpu")["ranks"]), "scale-out-model": model()}


if __name__ == "__main__":
    for name, picture in pictures().items():
        picture.write(name)
