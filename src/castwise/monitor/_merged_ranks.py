"""Merge the runs that ranks recorded separately: `castwise run` writes a folder for each rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from castwise.monitor._record_file import RUN_NAME
from castwise.monitor._recorded_run import Run, distinct_invariants, distinct_mistakes, first_record
from castwise.monitor._records import DiagnosisRecord, RunRecord
from castwise.monitor._skips import StepFault, agreed


def merge_ranks(runs: Iterable[Run]) -> list[Run]:
    """Merge the runs of ranks that skipped the same steps, and return all runs.

    The ranks of a run are in the folders `NAME`, `NAME-rank1`, `NAME-rank2` and so on. The merged run is that of rank 0
    with the skipped steps as all ranks know them: the most specific cause (a non-finite loss on one rank explains
    non-finite gradients on the others), the rank if only one is at fault, all named parameters, and the diagnoses of
    the ranks at fault. It has the mistakes of all ranks, and the invariants that did not hold on any.
    Samples, losses and times are those of rank 0.

    Ranks that had nothing in common to agree on one folder have folders of their own; those are merged as well.

    Ranks that skipped different steps stay separate runs. A rank that lags or was killed is compared as far as it goes.

    Args:
        runs: Runs in any order; a merged run takes the position of rank 0.
    """
    given = list(runs)
    by_rank: dict[tuple[Path, str, str], dict[int, Run]] = {}
    for run in given:
        name, rank = name_and_rank(run.path)
        by_rank.setdefault((run.path.resolve().parent.parent, name, run.path.name), {}).setdefault(rank, run)
    _join_folders(by_rank)
    for ranks in by_rank.values():
        if (first := ranks.get(0)) is None:
            continue
        alike = {rank: run for rank, run in sorted(ranks.items()) if rank and _are_alike(first, run, rank)}
        if alike:
            merged, others = _merged({0: first, **alike}), set(map(id, alike.values()))
            given = [merged if run is first else run for run in given if id(run) not in others]
    return given


def _join_folders(by_rank: dict[tuple[Path, str, str], dict[int, Run]]) -> None:
    """Put ranks that have no rank 0 in their folder of a run with the one that began last before or next after them."""
    for (folder, name, file), ranks in by_rank.items():
        if 0 in ranks or not RUN_NAME.fullmatch(folder.name):
            continue
        for rank, run in list(ranks.items()):
            firsts = [
                others
                for (other, *alike), others in by_rank.items()
                if alike == [name, file]
                and other.parent == folder.parent
                and RUN_NAME.fullmatch(other.name)
                and 0 in others
                and rank not in others
            ]
            if firsts:
                nearest = min(firsts, key=lambda others: abs(_began(others[0]) - _began(run)))
                nearest[rank] = ranks.pop(rank)


def _began(run: Run) -> float:
    return 0.0 if run.about is None else run.about.time or 0.0


def name_and_rank(file: Path) -> tuple[str, int]:
    """Return the model's name and the rank that the folder of a record stands for."""
    folder = file.resolve().parent.name
    found = re.fullmatch(r"(.+)-rank([1-9]\d{0,8})", folder)
    return (found[1], int(found[2])) if found else (folder, 0)


def ranks_of(file: Path) -> int:
    """Return the number of ranks in a record's first line; 1 if it cannot be read."""
    try:
        first = first_record(file)
    except (OSError, ValueError):
        return 1
    return _size(Run(file, settings=first.settings)) if isinstance(first, RunRecord) else 1


def _are_alike(first: Run, other: Run, rank: int) -> bool:
    """Return True if a rank belongs to the same training run and skipped the same steps, as far as both go."""
    size = _size(first)
    if not rank < size == _size(other):
        return False
    last = min(run.steps[-1].step if run.steps else 0 for run in (first, other))
    return _faults_until(last, first) == _faults_until(last, other)


def _size(run: Run) -> int:
    size = run.settings.get("ranks")
    return size if isinstance(size, int) else 1


def _faults_until(last: int, run: Run) -> list[tuple[int, bool]]:
    return [(step.step, step.has_fault) for step in run.steps if step.step <= last]


def _merged(ranks: Mapping[int, Run]) -> Run:
    first = ranks[0]
    known = {rank: dict(_skips(run)) for rank, run in ranks.items()}
    steps, diagnoses = [], [record for record in first.diagnoses if record.step not in known[0]]
    for step in first.steps:
        number = step.step
        if number in known[0]:
            knowing = {rank: skips[number] for rank, skips in known.items() if number in skips}
            skip = agreed(knowing, _size(first))
            step = replace(step, cause=skip.cause, rank=skip.rank, parameters=skip.parameters)
            diagnoses += skip.diagnoses
        steps.append(step)
    diagnoses.sort(key=lambda record: record.step)
    mistakes, invariants = distinct_mistakes(ranks.values()), distinct_invariants(ranks.values())
    return replace(first, steps=steps, diagnoses=diagnoses, mistakes=mistakes, invariants=invariants)


def _skips(run: Run) -> Iterator[tuple[int, StepFault]]:
    """Yield the number and facts of each step of a rank that was skipped, or taken with an inf or NaN."""
    diagnoses: dict[int, list[DiagnosisRecord]] = {}
    for record in run.diagnoses:
        diagnoses.setdefault(record.step, []).append(record)
    for step in run.steps:
        if step.has_fault:
            yield step.step, StepFault(step.why_skipped, step.parameters, tuple(diagnoses.get(step.step, ())))
