"""Draw the loss increase of 16-bit weights against their size, for explanation/master-weights.md.

python docs/pictures/weight_bits.py
"""

from __future__ import annotations

from typing import Any

from drawing import BLUE, GREY, ORANGE, PINK, Picture, result

REFERENCE, BARE = "fp32 weights", "bf16 weights"
LEFT, RIGHT, HEIGHT, BELOW = 70, 690, 96, 78
FEWEST, MOST = 4, 18  # bytes


def colour_of(method: str) -> str:
    """Return the colour of a method: reference, bare bf16 weights, peers or MasterWeights."""
    if method in (REFERENCE, BARE):
        return GREY if method == REFERENCE else ORANGE
    return PINK if ":" in method else BLUE


def gaps(optimizers: dict[str, Any]) -> Picture:
    """Draw a panel for each optimizer, with the mean and its interval for each method."""
    picture = Picture(
        720, 70 + len(optimizers) * (HEIGHT + BELOW), "Loss minus that of fp32 weights, by bytes per parameter"
    )
    legend = {GREY: "fp32 weights", ORANGE: "bf16 weights alone", PINK: "other libraries", BLUE: "MasterWeights"}
    for place, (colour, name) in enumerate(legend.items()):
        picture.dot(LEFT + 8 + 155 * place, 18, 5, colour)
        picture.text(LEFT + 18 + 155 * place, 22, name, size=12)
    top = 50.0
    for name, result_of in optimizers.items():
        drawn = {key: row for key, row in result_of["methods"].items() if "skipped" not in row and "8-bit" not in key}
        panel(picture, top, name, drawn)  # the page has 8-bit states in its table
        top += HEIGHT + BELOW
    words = "bytes per parameter: weight, autocast's copy or extra bits, gradient, state"
    picture.text((LEFT + RIGHT) / 2, top + 6, words, anchor="middle", size=12)
    return picture


def panel(picture: Picture, top: float, name: str, rows: dict[str, Any]) -> None:
    """Draw one optimizer's methods."""
    most = max(row["minus fp32 weights"]["interval"][1] for key, row in rows.items() if key != REFERENCE)
    zero = top + HEIGHT

    def x(nbytes: float) -> float:
        return LEFT + (RIGHT - LEFT) * (nbytes - FEWEST) / (MOST + 1 - FEWEST)

    def y(gap: float) -> float:
        return zero - (HEIGHT - 14) * gap / most

    picture.text(LEFT + 8, top + 4, f"{name}: held-out loss minus that of fp32 weights", size=13)
    step = next(each for each in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if most / each <= 4)
    for times in range(int(most / step) + 1):
        picture.line([(LEFT, y(times * step)), (RIGHT, y(times * step))], opacity=0.15 if times else 0.6)
        picture.text(LEFT - 8, y(times * step) + 4, f"{times * step:g}", anchor="end", size=12)
    for nbytes in range(FEWEST, MOST + 1, 2):
        picture.line([(x(nbytes), zero), (x(nbytes), zero + 4)], opacity=0.6)
        picture.text(x(nbytes), zero + 16, str(nbytes), anchor="middle", size=11, colour=GREY)
    columns: dict[int, int] = {}  # number of text lines already below a number of bytes
    for key, row in rows.items():
        place, colour = x(row["bytes per parameter"]), colour_of(key)
        if key != REFERENCE:
            low, high = row["minus fp32 weights"]["interval"]
            picture.line([(place, y(max(low, -most / 20))), (place, y(high))], colour, 2, 0.6)
        gap = 0.0 if key == REFERENCE else row["minus fp32 weights"]["mean"]
        picture.dot(place, y(gap), 4.5, colour)
        if key == BARE:
            picture.text(place + 9, y(gap) + 4, key, size=11, colour=colour)
            continue
        column = round(row["bytes per parameter"])
        for words in label(key):
            picture.text(place, zero + 30 + 13 * columns.get(column, 0), words, anchor="middle", size=11, colour=colour)
            columns[column] = columns.get(column, 0) + 1


def label(method: str) -> list[str]:
    """Return lines that fit into a column: the package of a peer, or the name of a rounding."""
    if method.endswith("bf16 states"):
        return [method.removesuffix(" bf16 states"), "bf16 states"]
    return [method.partition(":")[0].removeprefix("split, ")]


def pictures() -> dict[str, Picture]:
    """Return the picture of the committed result."""
    return {"weight-bits": gaps(result("learning-cpu")["optimizers"])}


if __name__ == "__main__":
    for name, picture in pictures().items():
        picture.write(name)
