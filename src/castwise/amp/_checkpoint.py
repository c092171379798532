"""The format of a scaler's state dict: torch's, with more entries for what torch's scaler does not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from castwise.amp import _torch_words as torch_words
from castwise.amp._checks import at_least, check_scale, count
from castwise.amp._schedules import Dynamic, Schedule

KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
COUNTS = ("steps_taken", "steps_skipped", "skips_in_a_row")
_OPTIONAL = (*COUNTS, "schedule")


class Saved(NamedTuple):
    """The checked contents of a state dict."""

    scale: float
    schedule: Schedule
    growth_tracker: int
    trackers: dict[str, float]
    counts: tuple[int, int, int]
    """In the order of `COUNTS`."""


def of_schedule(schedule: Schedule, trackers: Mapping[str, float]) -> dict[str, Any]:
    """Return the entry for a schedule: its name, its settings and the values of its trackers."""
    return {"name": type(schedule).__name__, "settings": _settings(schedule), "trackers": dict(trackers)}


def _settings(schedule: Schedule) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(schedule) if field.init]
    return {name: getattr(schedule, name) for name in fields}


def read(state_dict: Mapping[str, Any], schedule: Schedule) -> Saved:
    """Read a state dict for a scaler with the given schedule.

    Of a state dict without a schedule, such as torch's, the scale is used, and `Dynamic` also uses the factors. Of one
    with another kind of schedule, only the scale is used, unless it is from `Guard`.

    Raises:
        RuntimeError: It is empty, as a disabled scaler's is.
        TypeError: It is not a mapping, or an entry has the wrong type.
        ValueError: An entry is missing (then it is a KeyError, too), unknown or out of its range.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping from state_dict(), got {type(state_dict).__name__}")
    if not state_dict:
        ours: Exception = RuntimeError("Do not load it, or load it into a disabled scaler")
        raise torch_words.error(ours, lambda: torch_words.scaler().load_state_dict({}))
    missing, unknown = set(KEYS) - set(state_dict), set(state_dict) - {*KEYS, *_OPTIONAL}
    if missing or unknown:
        ours = ValueError(
            f"state_dict must have the entries {', '.join(KEYS)} and may have {', '.join(_OPTIONAL)}: "
            f"missing {sorted(missing)}, unknown {sorted(map(str, unknown))}"
        )
        raise torch_words.error(ours, lambda: torch_words.scaler().load_state_dict(dict(state_dict)))
    growth_tracker = count("_growth_tracker", state_dict["_growth_tracker"], 0)
    scale = check_scale("scale", state_dict["scale"])
    factors = {name: state_dict[name] for name in KEYS[1:4]}
    Dynamic(**factors)  # checked even where they are not used
    taken, skipped, in_a_row = (count(name, state_dict.get(name, 0), 0, bits=63) for name in COUNTS)
    entry = state_dict.get("schedule")
    trackers = schedule.trackers()
    if entry is not None and _name(entry) == type(schedule).__name__:
        schedule, trackers = _schedule(entry, schedule)
    elif entry is None and isinstance(schedule, Dynamic):
        schedule = dataclasses.replace(schedule, **factors)
        scale = schedule.adopt(scale)
    else:
        growth_tracker = 0
        scale = schedule.adopt(schedule.init_scale if entry is not None and _name(entry) == "Guard" else scale)
    return Saved(scale, schedule, growth_tracker, trackers, (taken, skipped, in_a_row))


def _name(entry: object) -> str:
    if not isinstance(entry, Mapping) or set(entry) != {"name", "settings", "trackers"}:
        raise ValueError(f"schedule must have the entries name, settings and trackers, got {entry!r}")
    if not isinstance(entry["name"], str):
        raise TypeError(f"the name of a schedule must be a string, got {entry['name']!r}")
    return entry["name"]


def _schedule(entry: Mapping[str, Any], like: Schedule) -> tuple[Schedule, dict[str, float]]:
    known = set(_settings(like))
    if not isinstance(entry["settings"], Mapping) or set(entry["settings"]) - known:
        raise ValueError(
            f"the settings of {entry['name']} must be among {', '.join(sorted(known))}, got {entry['settings']!r}"
        )
    schedule = dataclasses.replace(like, **entry["settings"])
    first = schedule.trackers()
    if not isinstance(entry["trackers"], Mapping) or set(entry["trackers"]) != set(first):
        raise ValueError(
            f"the trackers of {entry['name']} must be {', '.join(first) or 'empty'}, got {entry['trackers']!r}"
        )
    trackers: dict[str, float] = {
        name: count(name, value, 0) if isinstance(first[name], int) else at_least(name, value, 0.0)
        for name, value in entry["trackers"].items()
    }
    return schedule, trackers
