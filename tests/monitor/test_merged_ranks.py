"""What `castwise run` has recorded of each rank by itself is read as one run, with what the rank at fault knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.monitor.recorded import Record, sample, step, write

import castwise
from castwise.monitor import Run
from castwise.monitor._merged_ranks import merge_ranks

SCALE = 2.0**10


def records(skips: dict[int, str], steps: int = 6, **more: Any) -> list[Record]:
    """Steps, of which some are skipped for a cause, with a diagnosis of each skip."""
    found = []
    for number in range(1, steps + 1):
        cause = skips.get(number)
        found.append(step(number, SCALE, cause, **(more if cause else {})))
        if cause is not None:
            texts = dict.fromkeys(("phase", "op", "text", "advice"), "x")
            found.append({"kind": "diagnosis", "step": number, "cause": cause, "module": f"of a {cause}", **texts})
    return found


def ranks(folder: Path, *each: list[Record], size: int | None = None) -> list[Run]:
    """The runs of ranks, in the order of their folders."""
    names = ["Net", *(f"Net-rank{rank}" for rank in range(1, len(each)))]
    for name, given in zip(names, each, strict=True):
        write(folder / name, *given, ranks=len(each) if size is None else size)
    return [Run.read(folder / name) for name in names]


def skipped(run: Run) -> list[tuple[int, str, int | None]]:
    return [(each.step, each.cause, each.rank) for each in run.steps if each.skipped]


def test_a_skip_has_the_cause_that_weighs_most_and_its_rank(tmp_path: Path) -> None:
    first = records({1: "overflow", 4: "overflow"}, parameters=["a"])
    second = records({1: "overflow", 4: "non-finite loss"}, parameters=["b"])
    (run,) = merge_ranks(ranks(tmp_path, first, second))
    assert skipped(run) == [(1, "overflow", None), (4, "non-finite loss", 1)]
    assert [each.parameters for each in run.steps if each.skipped] == [("a", "b")] * 2
    assert [(each.step, each.cause, each.module, each.rank) for each in run.diagnoses] == [
        (1, "overflow", "of a overflow", 0),
        (4, "non-finite loss", "of a non-finite loss", 1),
    ]


def test_where_all_ranks_suspect_another_it_was_an_overflow(tmp_path: Path) -> None:
    (run,) = merge_ranks(ranks(tmp_path, *[records({3: "another rank"})] * 3))
    assert skipped(run) == [(3, "overflow", None)]


def test_samples_and_numbers_are_those_of_rank_0(tmp_path: Path) -> None:
    first = [*records({2: "overflow"}), sample(4, SCALE, {"a": -16.0}, {"a": 1.0})]
    second = [*records({2: "non-finite loss"}, loss="nan", seconds=9.0), sample(4, SCALE, {"a": -20.0}, {"a": 1.0})]
    given = ranks(tmp_path, first, second)
    (run,) = merge_ranks(given)
    assert run.path == given[0].path
    assert run.samples == given[0].samples
    assert [(each.loss, each.seconds) for each in run.steps] == [(2.0, 0.01)] * 6


def test_a_verdict_of_one_folder_covers_that_rank_only(tmp_path: Path) -> None:
    first, second = ranks(tmp_path, records({4: "overflow"}), records({4: "non-finite loss"}))
    (merged,) = merge_ranks([first, second])
    assert "inf or NaN on rank 1 at 1 step" in str(castwise.verdict(merged))
    assert "inf or NaN" not in str(castwise.verdict(first.path.parent))
    assert "inf or NaN at 1 step" in str(castwise.verdict(second.path.parent))


def test_mistakes_of_all_ranks_are_reported_once(tmp_path: Path) -> None:
    texts = dict.fromkeys(("name", "text", "corrected", "source"), "x")
    mistakes = [{"kind": "mistake", "file": "train.py", "line": line, **texts} for line in (3, 7)]
    (run,) = merge_ranks(ranks(tmp_path, [*records({}), mistakes[0]], [*records({}), *mistakes]))
    assert [mistake.line for mistake in run.mistakes] == [3, 7]


def test_ranks_that_skipped_different_steps_stay_runs_of_their_own(tmp_path: Path) -> None:
    given = ranks(tmp_path, records({2: "overflow"}), records({2: "overflow"}), records({3: "overflow"}))
    merged, apart = merge_ranks(given)
    assert merged.path.parent.name == "Net"
    assert apart is given[2]
    assert skipped(merged) == [(2, "overflow", None)]


@pytest.mark.parametrize("steps", [0, 3, 9])
def test_a_rank_that_is_behind_or_ahead_is_believed_as_far_as_it_goes(steps: int, tmp_path: Path) -> None:
    first, second = records({2: "overflow", 5: "another rank"}), records({2: "non-finite loss", 5: "overflow"}, steps)
    (run,) = merge_ranks(ranks(tmp_path, first, second))
    assert (
        skipped(run)
        == {
            0: [(2, "overflow", None), (5, "another rank", None)],
            3: [(2, "non-finite loss", 1), (5, "another rank", None)],
            9: [(2, "non-finite loss", 1), (5, "overflow", 1)],
        }[steps]
    )


def test_only_folders_of_ranks_of_one_training_run_are_merged(tmp_path: Path) -> None:
    of_more_ranks = ranks(tmp_path, records({}), records({}))
    write(tmp_path / "Net-rank1", *records({}), ranks=8)  # left behind by an earlier run
    of_more_ranks[1] = Run.read(tmp_path / "Net-rank1")
    elsewhere = Run.read(write(tmp_path / "b" / "Net-rank1", *records({}), ranks=2))
    other = Run.read(write(tmp_path / "Net-2-rank1", *records({}), ranks=2))
    by_themselves = ranks(tmp_path / "c", records({}), records({}), size=1)
    for given in (of_more_ranks, [of_more_ranks[0], elsewhere, other], by_themselves):
        assert merge_ranks(given) == given


def test_a_merged_run_comes_where_that_of_rank_0_was_and_stays_as_it_is(tmp_path: Path) -> None:
    before = Run.read(write(tmp_path / "A", *records({})))
    first, second = ranks(tmp_path, records({2: "overflow"}), records({2: "non-finite loss"}))
    after = Run.read(write(tmp_path / "Z", *records({})))
    merged = merge_ranks([second, before, first, after])
    assert [run.path.parent.name for run in merged] == ["A", "Net", "Z"]
    assert merge_ranks(merged) == merged
