"""The facts of a checkup as text and rows, for the terminal and for notebooks."""

from __future__ import annotations

from typing import Any

_COMPUTED = {True: "in hardware", False: "emulated", None: "unknown"}
FORMAT_NUMBERS = range(2, 7)  # the numeric columns of the table of formats


def facts_of(device: dict[str, Any]) -> str:
    """Return the facts of a device, which is given as a dict."""
    if device["device"] != "cpu":
        facts = [f"compute capability {'.'.join(map(str, device['capability']))}"] if device["capability"] else []
        facts += [f"{device['memory_bytes'] / 2**30:.1f} GiB"] if device["memory_bytes"] else []
        return "; ".join(facts)
    threads, units = device["threads"], device["units"]
    facts = [f"{threads} thread{'s' * (threads != 1)}", f"torch's own kernels use {device['vectors']}"]
    facts += [f"{name} hardware: {', '.join(units[name]) or 'none'}" for name in units]
    return "; ".join(facts + ([f"limited by {device['limit']}"] if device["limit"] else []))


def format_rows(formats: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of the table of formats, header first."""
    rows: list[tuple[str, ...]] = [
        ("format", "computed", "GFLOP/s", "quartiles", "times fp32", "quartiles", "matrices", "verdict")
    ]
    for entry in formats:
        start = (entry["format"], _COMPUTED[entry["native"]])
        if entry["error"] is not None:
            rows.append((*start, "", "", "", "", "", entry["error"]))
            continue
        numbers = [text for name in ("gflops", "times_fp32") for text in _quartiles(entry[name])]
        verdict = "" if entry["format"] == "fp32" else entry["verdict"]
        rows.append((*start, *numbers, f"{entry['size']} x {entry['size']}", verdict))
    return rows


def _quartiles(rates: dict[str, float]) -> tuple[str, str]:
    low, median, high = (f"{rates[name]:,.{0 if rates[name] >= 100 else 2}f}" for name in ("low", "median", "high"))
    return median, f"{low} - {high}"


def recipes_of(native: dict[str, bool]) -> str:
    """Return which recipes run in hardware, and which are emulated."""
    kinds = {"recipes in hardware": True, "recipes emulated": False}
    named = {kind: [name for name in native if native[name] is by_units] for kind, by_units in kinds.items()}
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in named.items() if names)


def advice_rows(recommended: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the recommended policy and schedule, each with its reason."""
    policy, schedule = recommended["policy"], recommended["schedule"]
    return [
        (
            "policy",
            f"castwise.policies.{policy}" if policy else "none: stay in fp32",
            recommended["policy_reason"],
        ),
        (
            "schedule",
            f"castwise.schedules.{schedule}()" if schedule else "none: no scaler",
            recommended["schedule_reason"],
        ),
    ]
