"""Draw how often a step reads and writes gradients before the optimizer, for explanation/one-read.md.

python docs/pictures/step_traffic.py
"""

from __future__ import annotations

from typing import Any

from drawing import BLUE, ORANGE, Picture, result

OPTIMIZERS = ("fused AdamW", "foreach AdamW")
STEPS = {
    "torch scaled step + update": "torch: scaled",
    "castwise scaled step + update": "castwise: scaled",
    "torch clip + step": "torch: clipped, not scaled",
    "torch scaled + clipped step + update": "torch: scaled + clipped",
    "castwise scaled + clipped step + update": "castwise: scaled + clipped",
}


def traffic(results: dict[str, Any], size: str = "124M") -> Picture:
    """Draw reads and writes of each kind of step as bars, in multiples of the gradients."""
    picture = Picture(720, 74 + len(OPTIMIZERS) * (34 + 36 * len(STEPS)), "Reads and writes of the gradients in a step")
    unit, left = 130, 210
    picture.rectangle(left, 8, 14, 14, BLUE)
    picture.text(left + 20, 20, "reads")
    picture.rectangle(left + 80, 8, 14, 14, ORANGE)
    picture.text(left + 100, 20, "writes")
    y = 50.0
    for optimizer in OPTIMIZERS:
        picture.text(10, y, optimizer, size=15)
        y += 12
        for step, name in STEPS.items():
            found = results[f"{size}, {optimizer}"]["gradient_traffic_before_the_optimizer"][step]
            picture.text(left - 8, y + 17, name, anchor="end", size=12)
            for place, (kind, colour) in enumerate((("reads", BLUE), ("writes", ORANGE))):
                picture.rectangle(left, y + 13 * place, unit * found[kind], 11, colour)
            y += 36
        y += 22
    base = y - 18
    for times in range(4):
        picture.line([(left + unit * times, 34), (left + unit * times, base)], opacity=0.2)
        picture.text(left + unit * times, base + 18, str(times), anchor="middle", size=12)
    picture.text(left + 1.5 * unit, base + 36, "times the bytes of all gradients", anchor="middle", size=12)
    return picture


def pictures() -> dict[str, Picture]:
    """Return the picture of the committed result."""
    return {"step-traffic": traffic(result("step_cost-cpu")["results"])}


if __name__ == "__main__":
    for name, picture in pictures().items():
        picture.write(name)
