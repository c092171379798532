"""Launches and waits of one iteration: never more than torch.amp's, and as many as the manual says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.accelerator.counts import TABLES, counted, in_page
from tests.accelerator.training import CLIPPING, KINDS, Training, counted_step

import castwise


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clipping", CLIPPING)
def test_no_iteration_waits_or_launches_more_than_torchs(kind: str, clipping: str) -> None:
    ours, theirs = (counted(library, kind, clipping) for library in (castwise, torch.amp))
    assert ours.host_waits <= theirs.host_waits, ours.lines
    assert ours.launches <= theirs.launches, {
        name: (count, theirs.ops.get(name, (0,))[0])
        for name, (count, _, _) in ours.ops.items()
        if count != theirs.ops.get(name, (0,))[0]
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clipping", CLIPPING)
def test_nor_does_a_whole_iteration_under_autocast(kind: str, clipping: str) -> None:
    ours, theirs = (counted_step(Training(library, kind, clipping)) for library in (castwise, torch.amp))
    assert ours.host_waits <= theirs.host_waits, ours.lines
    assert ours.launches <= theirs.launches


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clipping", ["none", "unscale_ and torch's"])
def test_nor_do_many_iterations(kind: str, clipping: str) -> None:
    """Events that are two updates old do not count: the device is past them."""
    waits, launches = [], []
    for library in (castwise, torch.amp):
        training = Training(library, kind, clipping, growth_interval=1000)
        counts = [counted_step(training, warm=1) for _ in range(20)]
        waits.append(sum(count.host_waits - count.waits.get("event", 0) for count in counts))
        launches.append(sum(count.launches for count in counts))
    assert waits[0] <= waits[1]
    assert launches[0] <= launches[1]


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.name)
def test_the_manual_has_these_counts(page: Path) -> None:
    assert in_page(page) == TABLES[page](), "run `python -m tests.accelerator.counts`"
