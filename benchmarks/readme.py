"""Write the numbers in README.md and on the manual's start page, between their marks, from committed results.

python -m benchmarks.readme
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
BEGINS, ENDS = "<!-- figures begins -->\n", "<!-- figures ends -->\n"


RESULTS = ROOT / "benchmarks" / "results"


def result(name: str) -> Any:
    """Return a committed result: a GPU's, if there is one."""
    files = [RESULTS / f"{name}-{device}.json" for device in ("cuda", "cpu")]
    return json.loads(next(file for file in files if file.exists()).read_text())


def figures(docs: str) -> str:
    """Return the lines with numbers.

    Args:
        docs: How the page's links to the manual begin.
    """
    step = result("step_cost")["results"]["124M, fused AdamW"]["castwise_to_torch"]["scaled + clipped step + update"]
    inference = result("weight_cache")["cases"]["MLP, inference, batch 1"]["torch / castwise"]
    public, held_out = (result("broken_scripts")[kind].values() for kind in ("public", "held_out"))
    explained = sum(False not in (one["cause"], one["line"], one["remedy"]) for one in public)
    first = [one["first"] for one in held_out]
    in_full = sum(False not in one for one in first)
    in_part = sum(False in one and True in one for one in first)
    watching = result("watching_cost")["cases"]
    watched = [
        f"{case['options']['castwise run']['more'] * case['cpu ms']:.1f} ms to a step of {case['cpu ms']:.0f} ms "
        f"({case['options']['castwise run']['more']:.1%})"
        for case in (watching["long step"], watching["short step"])
    ]
    fp32, split = (result("master_weights")["bytes per parameter"][name] for name in ("fp32 weights", "split"))
    stepped = result("master_weights")["optimizer steps"]["fused AdamW"]["to fp32 weights"]
    compiled = stepped.get("split, compiled")
    with_it = f" ({compiled['median']:.1f} with `compiled=True`)" if compiled else ""
    training = result("master_weights")["training step"]["to fp32 weights"]["split"]["median"]
    lines = [
        f"Unscaling, clipping and stepping fused AdamW (124M parameters) takes {1 - step['median']:.0%} less time with "
        "`scaler.clip_grad_norm_` than with `torch.amp`.",
        f"bf16 inference with fp32 weights (an MLP, batch size 1) is {inference['median']:.1f} times as fast with a "
        "`WeightCache` as with `torch.autocast`.",
        f"`castwise run` names cause, line and remedy of {explained} of the {len(public)} [faults of public "
        f"projects]({'benchmarks/README.md' if docs else 'benchmarks.md'}) that it was developed with. Of "
        f"{len(first)} that it had not met, it named all three for {in_full}, some for {in_part}, and none for "
        f"{len(first) - in_full - in_part}.",
        f"In bf16 without a scaler, `castwise run` adds {watched[0]} and {watched[1]}, [mostly Python "
        f"time]({docs}integrations/run.md#overhead).",
        f"`MasterWeights` cuts AdamW from {fp32['sum']:.0f} to {split['sum']:.0f} bytes per parameter: weight "
        f"{split['weights'] + split['kept']:.0f} (was {fp32['weights'] + fp32['casts']:.0f}), gradient "
        f"{split['gradients']:.0f} (was {fp32['gradients']:.0f}), state {split['state']:.0f}. The optimizer's step "
        f"takes {stepped['split']['median']:.1f} times as long{with_it}, and a training step of a GPT {training:.2f} "
        "times.",
        "With `MasterWeights` and castwise's integrations, losses under the defaults of Accelerate, Lightning and the "
        "Transformers Trainer are bit for bit those of fp32 weights if [no code reads a weight or its dtype]"
        f"({docs}tutorials/less-memory.md#where-results-differ-from-fp32-weights). Sums over micro-batches and ranks "
        f"have to be [in fp32]({docs}tutorials/less-memory.md#gradient-accumulation).",
    ]
    return "".join(f"- {line}\n" for line in lines)


def main() -> None:
    """Update the pages."""
    for page in PAGES:
        before, _, rest = page.read_text().partition(BEGINS)
        _, _, after = rest.partition(ENDS)
        docs = "docs/" if page.parent == ROOT else ""
        page.write_text(f"{before}{BEGINS}{figures(docs)}{ENDS}{after}")


if __name__ == "__main__":
    main()
