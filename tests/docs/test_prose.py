"""Phrases that stop a native reader, and what to write instead: the house style of docstrings, comments and pages."""

from __future__ import annotations

import functools
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
    r"\btold\b": "the exact verb: raises, warns, notifies; distinguished for told apart",
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
    r"\bis silently wrong\b": "silently goes wrong",
    r"\bcounts? no (versions?|writes)\b": "does not bump the version counter",
    r"\b[Ww]hat (is|was) known (about|of)\b": "name the facts: step results, notes on versions",
    r"\b[Ww]ho wants to\b": "to do this, call ...",
    r"\bplaces in (these|the) (frameworks|libraries)\b": "framework integrations",
    r"\b(a|another|each|its|other|the|this) room\b|\brooms\b|\b(made|makes?) room\b": "package, module, memory",
    r"\banew\b": "again, over",
    r"\b(act|agree|behave|decide|step)s? alike\b|\balike on\b": "in the same way",
    r"\bSee there\b": "As in `name`.",
}


def _pages() -> list[Path]:
    kinds = {"src": ("py", "j2", "js"), "examples": ("py", "ipynb"), "docs": ("md",), "benchmarks": ("md",)}
    found = [path for folder, ends in kinds.items() for end in ends for path in (ROOT / folder).rglob(f"*.{end}")]
    return sorted(path for path in [*found, *ROOT.glob("*.md")] if "_build" not in path.parts)


@functools.cache
def _texts() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): re.sub(r"\s+(#|//)?\s*", " ", path.read_text()) for path in _pages()}


@pytest.mark.parametrize("pattern", BANNED)
def test_no_page_has_a_phrase_that_stops_its_reader(pattern: str) -> None:
    found = [f"{path}: {match[0]!r}" for path, text in _texts().items() for match in re.finditer(pattern, text)]
    assert found == [], f"write {BANNED[pattern]!r}"


def test_pages_of_all_kinds_are_read() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in _pages()}
    assert names >= {"README.md", "benchmarks/README.md", "benchmarks/results/README.md", "docs/index.md"}
    templates = "src/castwise/report/templates"
    assert names >= {"src/castwise/__init__.py", f"{templates}/report.html.j2", f"{templates}/report.js"}


def test_the_patterns_find_what_they_are_for() -> None:
    assert re.search(next(p for p in BANNED if "training(?!" in p), "the end of a training, too")
    assert not re.search(next(p for p in BANNED if "training(?!" in p), "the end of a training run")
