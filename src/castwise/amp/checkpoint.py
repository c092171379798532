"""The format in which a scaler is saved, that of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castwise.amp.schedules import Dynamic, check_scale, integer

KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def read(state_dict: Mapping[str, Any]) -> tuple[Dynamic, int]:
    """Return the schedule and the growth tracker of a state dict.

    Raises:
        RuntimeError: It is empty, as a disabled scaler's is.
        TypeError: It is not a mapping, or an entry has the wrong type.
        ValueError: An entry is missing, unknown or out of its range.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping as from state_dict(), got {type(state_dict).__name__}")
    if not state_dict:
        raise RuntimeError(
            "the source state dict is empty, probably saved from a disabled GradScaler: do not load it, "
            "or load it into a disabled scaler"
        )
    missing, unknown = set(KEYS) - set(state_dict), set(state_dict) - set(KEYS)
    if missing or unknown:
        raise ValueError(
            f"state_dict must have exactly the entries {', '.join(KEYS)}: "
            f"missing {sorted(missing)}, unknown {sorted(map(str, unknown))}"
        )
    growth_tracker = integer("_growth_tracker", state_dict["_growth_tracker"])
    if not 0 <= growth_tracker < 2**31:
        raise ValueError(f"_growth_tracker must be an integer in [0, 2**31), got {growth_tracker!r}")
    schedule = Dynamic(
        init_scale=check_scale("scale", state_dict["scale"]),
        growth_factor=state_dict["growth_factor"],
        backoff_factor=state_dict["backoff_factor"],
        growth_interval=state_dict["growth_interval"],
    )
    return schedule, growth_tracker
