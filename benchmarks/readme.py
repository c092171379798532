"""Write the numbers in README.md and on the manual's start page, between their marks, from committed results.

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
    """Return the lines with numbers."""
    step = result("step_cost")["results"]["124M, fused AdamW"]["castwise_to_torch"]["scaled + clipped step + update"]
    inference = result("weight_cache")["cases"]["MLP, inference, batch 1"]["torch / castwise"]
    faults = result("fault_finding")
    by_anomaly_mode, named = (
        [of[tool]["named"] for of in faults["results"].values() if of[tool]["named"] is not None]
        for tool in ("set_detect_anomaly", "castwise.diagnose")
    )
    sizes = result("master_weights")["bytes per parameter"]
    planted = faults["rounds"] * len(named)
    lines = [
        f"Unscaling, clipping and the optimizer's step together take {1 - step['median']:.0%} less time than under "
        "`torch.amp`: each gradient is read once.",
        f"Inference in bf16 from fp32 weights is {inference['median']:.1f} times as fast as under `torch.autocast`, "
        "which casts the weights in every call.",
        f"Of {planted} planted infs and NaNs, {sum(named)} are traced to the module that made them (torch's anomaly "
        f"mode names ops, and {sum(by_anomaly_mode)} modules).",
        f"With `MasterWeights` and AdamW, a parameter takes {sizes['split']['sum']:.0f} bytes instead of "
        f"{sizes['fp32 weights']['sum']:.0f} (weight, cast, gradient, state), and losses stay the same, bit for bit.",
    ]
    return "".join(f"- {line}\n" for line in lines)


def main() -> None:
    """Update the pages."""
    for page in PAGES:
        before, _, rest = page.read_text().partition(BEGINS)
        _, _, after = rest.partition(ENDS)
        page.write_text(f"{before}{BEGINS}{figures()}{ENDS}{after}")


if __name__ == "__main__":
    main()
