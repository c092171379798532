"""Phrases that stop a native reader, and what to write instead: the house style of docstrings, comments and pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A pattern, and what to write.
BANNED = {
    r"\bSay whether\b": "Return True if",
    r"\bin (the )?place of\b": "instead of",
    r"\btrainings\b": "training runs",
    r"\b[Aa] training(?! (batch|data|example|framework|iteration|job|loop|run|sample|script|set|step))\b": "a run",
    r"\b([Ww]hoever|[Ww]hom|[Ss]omebody|[Nn]obody)\b": "the code that is meant: a subclass, a hook, callers",
    r"\b[Ww]hat (has |have )?be(came|comes|come) of\b": "the outcome of",
    r"\b([Ii]n|[Oo]ut)side of\b": "inside, outside",
    r"\bin force\b": "active",
    r"\b(is|are|was|were) told\b": "the exact verb: raises, warns, notifies",
    r"\b(is|are|was|were) looked at\b": "is checked, is read",
    r"\band (the|its) like\b": "and similar ones, or name them",
    r"\bfound out\b": "detected, determined",
    r"\b(are|is) on (its|their) way\b": "pending",
    r"\bhence\b": "so, because",
    r"\bAs of `": "See `",
    r"\b(is|are) still on (its|their) way\b": "pending",
    r"\bdearer\b": "slower, more expensive",
    r"\bis innocent\b": "is not the cause",
    r"\bgo both ways\b": "are interchangeable with torch's",
    r"\bwithout a word\b": "silently",
    r"\b(says?|knows?|tells?|learns?) nothing of\b": "says nothing about, does not know",
    r"\bgo(es)? on (with|from)\b": "continue with, resume from",
    r"\bshall\b": "must, should",
    r"[;,:.] (and )?[Ss]o it is (?!imported)": "the same holds for",
    r"(?<!there )\bis no (column|finite|list|number|power|record|script|step|string|tensor)\b": "is not a",
    r"\bSay so (if|of)\b": "Report it if",
    r"\bwhich is said\b": "and a warning says so",
}


def _pages() -> list[Path]:
    folders = [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").glob("*.py"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path for path in [*folders, *ROOT.glob("*.md")] if "_build" not in path.parts)


@pytest.mark.parametrize("pattern", BANNED)
def test_no_page_has_a_phrase_that_stops_its_reader(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]!r}"
        for path in _pages()
        for match in re.finditer(pattern, re.sub(r"\s+#?\s*", " ", path.read_text()))
    ]
    assert found == [], f"write {BANNED[pattern]!r}"


def test_the_patterns_find_what_they_are_for() -> None:
    assert re.search(next(p for p in BANNED if "training(?!" in p), "the end of a training, too")
    assert not re.search(next(p for p in BANNED if "training(?!" in p), "the end of a training run")
