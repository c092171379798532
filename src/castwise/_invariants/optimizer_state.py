"""`raw-half-optimizer-state`: running averages in 16 bits that can rise but not fall."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from castwise._invariants.invariant import Violation
from castwise._number_text import percent
from castwise._state_decay import factor_of, falling_share

_HALF = (torch.bfloat16, torch.float16)


def averages_that_cannot_fall(optimizer: torch.optim.Optimizer) -> Iterator[Violation]:
    """Yield the first average of an optimizer of torch's own that is in 16 bits and cannot fall everywhere.

    Other optimizers may round stochastically or compensate.
    """
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            for name, state in optimizer.state.get(param, {}).items():
                beta = factor_of(name, group)
                if beta is None or not isinstance(state, torch.Tensor) or state.dtype not in _HALF:
                    continue
                share = falling_share(state.dtype, beta)
                if share < 1.0:
                    yield _broken(type(optimizer).__name__, name, state.dtype, beta, share)
                    return


def _broken(optimizer: str, name: str, dtype: torch.dtype, beta: float, share: float) -> Violation:
    short = str(dtype).removeprefix("torch.")
    where = "nowhere" if share == 0.0 else f"in {percent(share)} of each binade"
    return Violation(
        "raw-half-optimizer-state",
        f"{optimizer} keeps {name} in {short}, where an average with beta {beta:g} can fall {where}: it rises with a "
        "large gradient and stays there, so that later updates are too small.",
        f"Keep it in fp32: castwise.MasterWeights(optimizer, model, dtype=torch.{short}); or take a smaller beta, or "
        "fp32 weights.",
    )
