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
    faults = result("fault_finding")
    by_anomaly_mode, named = (
        [of[tool]["named"] for of in faults["results"].values() if of[tool]["named"] is not None]
        for tool in ("set_detect_anomaly", "castwise.diagnose")
    )
    sizes = result("master_weights")["bytes per parameter"]
    planted = faults["rounds"] * len(named)
    lines = [
        f"A clipped step of fused AdamW takes {1 - step['median']:.0%} less time than under `torch.amp`: unscaling and "
        "clipping share one read of the gradients.",
        f"bf16 inference from fp32 weights is {inference['median']:.1f} times as fast as under `torch.autocast`, which "
        "casts every weight in every call.",
        f"castwise named the faulty module for {sum(named)} of {planted} planted infs and NaNs; torch's anomaly mode, "
        f"which names ops, for {sum(by_anomaly_mode)}.",
        f"`MasterWeights` trains with AdamW in {sizes['split']['sum']:.0f} bytes per parameter instead of "
        f"{sizes['fp32 weights']['sum']:.0f} (weight, cast, gradient, optimizer state), with the same losses, bit for "
        "bit.",
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
