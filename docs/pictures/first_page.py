"""Draw the four figures of the start page as bars.

python docs/pictures/first_page.py
"""

from __future__ import annotations

from typing import NamedTuple

from drawing import BLUE, GREY, Picture, result

WIDTH, LEFT, PANEL = 360, 96, 74


class Pair(NamedTuple):
    """One figure: the shorter bar is the better one."""

    title: str
    rival: str
    """Name of what castwise is compared with."""
    theirs: float
    ours: float
    digits: int
    """Decimals to print."""


def pairs() -> list[Pair]:
    """Return the figures of README.md, from the same results."""
    step = result("step_cost-cpu")["results"]["124M, fused AdamW"]["castwise_to_torch"][
        "scaled + clipped step + update"
    ]
    inference = result("weight_cache-cpu")["cases"]["MLP, inference, batch 1"]["torch / castwise"]
    faults = result("fault_finding-cpu")
    named = [of for of in faults["results"].values() if of["castwise.diagnose"]["named"] is not None]
    planted = faults["rounds"] * len(named)
    by_transformers, by_castwise = (
        sum(of[tool]["named"] for of in named) for tool in ("DebugUnderflowOverflow", "castwise.diagnose")
    )
    sizes = result("master_weights-cpu")["bytes per parameter"]
    return [
        Pair("Unscaling, clipping and stepping: time", "torch.amp", 1.0, step["median"], 2),
        Pair("bf16 inference with fp32 weights: time", "torch.autocast", 1.0, 1.0 / inference["median"], 2),
        Pair(
            f"Modules not identified, of {planted}", "transformers", planted - by_transformers, planted - by_castwise, 0
        ),
        Pair("AdamW: bytes per parameter", "fp32 weights", sizes["fp32 weights"]["sum"], sizes["split"]["sum"], 0),
    ]


def bars(figures: list[Pair]) -> Picture:
    """Draw two bars for each figure."""
    says = "; ".join(
        f"{each.title}: {each.rival} {each.theirs:.{each.digits}f}, castwise {each.ours:.{each.digits}f}"
        for each in figures
    )
    picture = Picture(WIDTH, PANEL * len(figures), says)
    for row, each in enumerate(figures):
        top = PANEL * row
        picture.text(0, top + 14, each.title, size=13)
        for place, (name, value, colour) in enumerate([(each.rival, each.theirs, GREY), ("castwise", each.ours, BLUE)]):
            length = (WIDTH - LEFT - 40) * value / max(each.theirs, each.ours)
            picture.text(LEFT - 6, top + 34 + 20 * place, name, anchor="end", size=12)
            picture.rectangle(LEFT, top + 23 + 20 * place, length, 14, colour)
            picture.text(LEFT + length + 6, top + 34 + 20 * place, f"{value:.{each.digits}f}", size=12)
    return picture


def pictures() -> dict[str, Picture]:
    """Return the picture of the committed results."""
    return {"four-figures": bars(pairs())}


if __name__ == "__main__":
    for name, picture in pictures().items():
        picture.write(name)
