"""Endings of errors about unknown names: the allowed names, or the closest matches."""

from __future__ import annotations

from collections.abc import Iterable


def listed(names: Iterable[str]) -> str:
    """Return names quoted and separated by commas, for an error message."""
    return ", ".join(map(repr, names))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known names closest to an unknown one, or "" if none is close."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
