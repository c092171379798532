"""What ranks that could not agree say about each other, in at most 2 KB however many ranks there are."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

ANSWER_S = 5.0
"""How long a rank waits for the other ranks to report that a collective has failed, in seconds."""
_POLL_S = 0.05
_NO_STORE = "reports of others cannot be reached: the group has no store, or its host, usually rank 0, does not answer"
_ALL_READ, _READERS = 1024, 8
"""The largest number of ranks of which each reads all reports; among more, only the first eight to fail do."""
_RANKS_NAMED, _VIEWS_SHOWN, _TEXT_SHOWN, _TEXT_SENT = 10, 4, 280, 1024


def shortened(text: str, limit: int = _TEXT_SHOWN) -> str:
    """Return a text of at most 280 characters (or another limit), without its middle if it is longer."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[: half - 3]} ... {text[2 - half :]}"


def _shown(report: str, differs_at: int) -> str:
    """Return a report of at most 280 characters, with what differs from others, and the step at its end."""
    half = _TEXT_SHOWN // 2
    if len(report) <= _TEXT_SHOWN or not half - 40 <= differs_at < len(report) - half + 2:
        return shortened(report)
    start = differs_at - 30  # with the name of the setting
    return f"{report[:60]} ... {report[start : start + 110]} ... {report[-90:]}"


def several(ranks: Iterable[int]) -> str:
    """Return the first ten ranks, and how many more there are."""
    ordered = sorted(ranks)
    more = len(ordered) - _RANKS_NAMED
    return f"ranks {ordered[:_RANKS_NAMED]}" + (f" and {more} more" if more > 0 else "")


def views_of(reports: Iterable[tuple[int, str]]) -> str:
    """Return which ranks report what, the report of most ranks first.

    Args:
        reports: Rank and report of each rank that answered.
    """
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for rank, report in sorted(reports):
        alike[report].append(rank)
    views = sorted(alike.items(), key=lambda view: -len(view[1]))
    differing = (index for index, letters in enumerate(zip(*alike, strict=False)) if len(set(letters)) > 1)
    at = next(differing, 0)
    parts = [f"{several(ranks)} report: {_shown(report, at)}" for report, ranks in views[:_VIEWS_SHOWN]]
    if others := [rank for _, ranks in views[_VIEWS_SHOWN:] for rank in ranks]:
        parts.append(f"{several(others)} report yet something else")
    return "; ".join(parts)


def failures_of(group: Any, report: str) -> str:
    """Return in words which ranks of a group report within five seconds that a collective failed, and which do not.

    Ranks report through the group's store, because the group's connections may be gone.

    Args:
        group: The process group.
        report: What this rank has to report.
    """
    ranks, rank, failures = torch.distributed.get_process_group_ranks(group), torch.distributed.get_rank(), _Failures()
    # In a thread: a store whose host has ended may not answer for as long as the group's timeout.
    exchange = threading.Thread(target=failures.exchange, args=(group, len(ranks), rank, report), daemon=True)
    exchange.start()
    exchange.join(ANSWER_S + 1.0)
    if not failures.count:
        return f"{views_of([(rank, report)])}; {_NO_STORE}"
    if not failures.reports:
        return f"{failures.count} of {len(ranks)} ranks failed: see the errors of the first {_READERS}"
    missing = set(ranks) - set(failures.reports)
    silent = f"; no report within {ANSWER_S:g} s from {several(missing)}, which ended, hang or have not noticed it yet"
    return views_of(failures.reports.items()) + (silent if missing else "")


class _Failures:
    """The reports of ranks on which a collective failed."""

    def __init__(self) -> None:
        self.count = 0
        self.reports: dict[int, str] = {}

    def exchange(self, group: Any, size: int, rank: int, report: str) -> None:
        """Report a failure on this rank, and wait for the reports of the others."""
        try:
            store = torch.distributed.distributed_c10d.PrefixStore("castwise/failures", group.get_group_store())
            number = store.add("count", 1)
            store.set(str(number), f"{rank} {shortened(report, _TEXT_SENT)}")
            give_up = time.monotonic() + ANSWER_S
            reads, keys = size <= _ALL_READ or number <= _READERS, [str(number)]
            while True:
                count = store.add("count", 0)
                if reads:
                    keys = list(map(str, range(1, count + 1)))
                if (count == size and store.check(keys)) or time.monotonic() >= give_up:
                    break
                time.sleep(_POLL_S)
            if reads:
                # A rank that died after it was counted has left no report, and reading it would wait for ever.
                keys = keys if store.check(keys) else [key for key in keys if store.check([key])]
                given = [text.decode().partition(" ") for text in store.multi_get(keys)]
                self.reports = {int(rank): text for rank, _, text in given}
            self.count = count
        except (RuntimeError, AttributeError):  # the store is gone, or this kind of group has none
            return
