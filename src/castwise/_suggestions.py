"""How errors about names end: with what is allowed, or what was perhaps meant."""

from __future__ import annotations

from collections.abc import Iterable


def listed(names: Iterable[str]) -> str:
    """Return names as an error's text lists them."""
    return ", ".join(map(repr, names))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question that ends an error's text: which known names are near to one that is not."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
