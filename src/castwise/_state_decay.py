"""Whether a running average of an optimizer can fall at all in the dtype that it is kept in."""

from __future__ import annotations

import torch

# An optimizer's running averages, with the setting of its `param_groups` that has their factors, and its index there.
_FACTORS = {"exp_avg": ("betas", 0), "exp_avg_sq": ("betas", 1), "square_avg": ("alpha", None)}


def falling_share(dtype: torch.dtype, beta: float) -> float:
    """Return in which share of each binade an average v, kept in a dtype and rounded to nearest, can fall.

    Without gradients, v becomes beta v. Rounded to nearest, that is v again unless (1 - beta) v is at least half of v's
    last bit, 2^(e - p), where 2^e <= v < 2^(e + 1) and the dtype keeps p bits after the leading one.

    Args:
        dtype: A floating-point dtype.
        beta: The factor of the average, in [0, 1].

    Example:
        >>> [round(falling_share(torch.bfloat16, beta), 2) for beta in (0.995, 0.998, 0.999)]
        [1.0, 0.05, 0.0]
    """
    if beta >= 1.0:
        return 0.0
    lowest = torch.finfo(dtype).eps / 2.0 / (1.0 - beta)  # of v / 2^e, which is in [1, 2)
    return min(1.0, max(0.0, 2.0 - lowest))


def factor_of(name: str, group: dict[str, object]) -> float | None:
    """Return the factor of a running average by its name in an optimizer's state; None if it is not known.

    Args:
        name: Such as "exp_avg_sq".
        group: One of the optimizer's `param_groups`.
    """
    setting, index = _FACTORS.get(name, ("", None))
    found = group.get(setting)
    if index is not None:
        found = found[index] if isinstance(found, (tuple, list)) and len(found) > index else None
    return float(found) if isinstance(found, (int, float)) else None
