"""Repositories with one planted bug: each commit is one change, and the bug is in all versions from its commit on."""

from __future__ import annotations

import itertools
import random

import pytest
from benchmarks.changes.edits import SAME, WRONG
from benchmarks.checked_changes import FOLDER, changed

from benchmarks import bisected


@pytest.mark.parametrize("program", SAME)
def test_commits_are_rewrites_except_for_one(program: str) -> None:
    source = (FOLDER / f"{program}.py").read_text()
    for bug in WRONG[program][:5]:
        texts = bisected.versions(source, SAME[program], bug, 40, random.Random(0))
        assert len(texts) == bisected.COMMITS == 64
        assert texts[0] == source
        assert all(before != after for before, after in itertools.pairwise(texts))
        assert all(text.count(bug.old) == 1 for text in texts[:40])
        assert texts[40] == changed(texts[39], bug)
        assert len(set(texts[:40])) > 20
        assert not any(text in texts[:40] for text in texts[40:])


def test_the_table_counts_the_commits_that_were_found() -> None:
    one = {"bug": "a", "commit": 3, "found": 3, "verdict": "v", "checks": 7, "cpu_seconds": 5.0}
    found = {"gpt": one, "cnn": {**one, "found": None, "checks": 2, "cpu_seconds": 9.0}}
    assert bisected.summed(found) == {"right": 1, "of": 2, "most_checks": 7, "most_cpu_seconds": 9.0}
