"""Write the figures of README.md and of the manual's start page from committed results, between their marks.

python benchmarks/readme.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
BEGINS, ENDS = "<!-- figures begins -->\n", "<!-- figures ends -->\n"


def result(name: str) -> Any:
    """Return a committed result."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}-cpu.json").read_text())


def figures() -> str:
    """Return the lines that have figures."""
    step = result("step_cost")["results"]["124M, fused AdamW"]["castwise_to_torch"]["scaled + clipped step + update"]
    inference = result("weight_cache")["cases"]["MLP, inference, batch 1"]["torch / castwise"]
    found = [of["castwise.diagnose"] for of in result("fault_finding")["results"].values()]
    sizes = result("master_weights")["bytes per parameter"]
    planted = result("fault_finding")["rounds"] * len(found)
    lines = [
        f"A scaled and clipped step takes {step['median']:.2f} of `torch.amp`'s time: gradients are read once.",
        f"Inference in bf16 from fp32 weights is {inference['median']:.1f} times as fast: weights are cast once.",
        f"Of {planted} planted faults {sum(of['named'] for of in found)} are named, down to the module and the line.",
        f"A weight takes {sizes['split']['sum']:.0f} bytes instead of {sizes['fp32 weights']['sum']:.0f} with AdamW, "
        "and the numbers stay the same: 16-bit weights learn as fp32 ones.",
    ]
    return "".join(f"- {line}\n" for line in lines)


def main() -> None:
    """Write them."""
    for page in PAGES:
        before, _, rest = page.read_text().partition(BEGINS)
        _, _, after = rest.partition(ENDS)
        page.write_text(f"{before}{BEGINS}{figures()}{ENDS}{after}")


if __name__ == "__main__":
    main()
