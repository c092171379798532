"""Rivals take turns in random order; ratios, intervals and verdicts are what numpy and the binomial law say."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from benchmarks.pairing import FEWEST, Rounds, compare, host_seconds, interval_of_median, race, ratio, seconds

QUIET = [1.0, 1.01, 0.99] * 5
BUSY = [1.0, 1.4, 0.7] * 5
ONES = [1.0] * 15


def verdict_on(ours: list[float], again: list[float]) -> str:
    return compare(ours, ONES, ratio(again, ONES))["verdict"]


def of(factor: float, noise: list[float] = QUIET) -> list[float]:
    return [factor * value for value in noise]


def recording_race(rounds: Rounds, warm_up: int, seed: int) -> tuple[list[str], dict[str, list[float]]]:
    ran: list[str] = []

    def rival(name: str) -> Callable[[], float]:
        def run() -> float:
            ran.append(name)
            return float(len(ran))

        return run

    return ran, race({name: rival(name) for name in "abc"}, rounds, warm_up, seed)


def test_each_round_runs_every_rival_once_in_an_order_of_its_own() -> None:
    ran, taken = recording_race(Rounds(600), warm_up=0, seed=0)
    orders = Counter("".join(ran[start : start + 3]) for start in range(0, len(ran), 3))
    assert set(orders) == {"".join(order) for order in itertools.permutations("abc")}
    assert min(orders.values()) > 60  # of 100 expected: less has a probability of 10^-5
    assert {name: len(values) for name, values in taken.items()} == dict.fromkeys("abc", 600)


def test_times_of_a_round_stay_together_and_the_warm_up_is_forgotten() -> None:
    _, taken = recording_race(Rounds(4), warm_up=2, seed=1)
    for number in range(4):
        assert sorted(taken[name][number] for name in "abc") == [6.0 + 3 * number + step for step in (1, 2, 3)]


def test_the_order_is_the_same_for_the_same_seed() -> None:
    assert recording_race(Rounds(9), 0, seed=3)[0] == recording_race(Rounds(9), 0, seed=3)[0]
    assert recording_race(Rounds(9), 0, seed=3)[0] != recording_race(Rounds(9), 0, seed=4)[0]


def test_without_patience_there_are_as_many_rounds_as_an_interval_needs() -> None:
    _, taken = recording_race(Rounds(100, patience_s=0.0), warm_up=2, seed=0)
    assert {len(values) for values in taken.values()} == {FEWEST}
    assert interval_of_median([*range(FEWEST)]) == (1, FEWEST - 2)  # one outlier at either end does no harm
    assert interval_of_median([*range(FEWEST - 1)]) == (0, FEWEST - 2)


def test_ratios_are_of_pairs() -> None:
    drift = np.linspace(1.0, 9.0, 11)  # a machine that slows down hits both
    found = ratio(list(2.0 * drift), list(drift))
    assert found["median"] == found["quartiles"][0] == found["quartiles"][1] == 2.0
    with pytest.raises(ValueError, match=r"zip\(\)"):
        ratio([1.0, 2.0], [1.0, 2.0, 3.0])


def test_median_and_quartiles_are_numpys() -> None:
    ours, theirs = np.random.default_rng(0).lognormal(size=(2, 25))
    found = ratio(list(ours), list(theirs))
    expected = np.quantile(ours / theirs, [0.25, 0.5, 0.75], method="weibull")
    assert [found["quartiles"][0], found["median"], found["quartiles"][1]] == pytest.approx(expected)
    assert found["rounds"] == 25


@pytest.mark.parametrize("n", [2, 5, 6, 8, 9, 25, 60, 100])
def test_the_interval_leaves_out_as_much_as_the_sign_test_allows(n: int) -> None:
    low, high = interval_of_median([float(value) for value in range(n)])

    def confidence(left_out: int) -> float:
        return 1 - 2 * sum(math.comb(n, k) for k in range(left_out + 1)) / 2**n

    left_out = int(low)
    assert high == n - 1 - left_out
    assert confidence(left_out) >= 0.95 or (left_out == 0 and n < 6)
    assert confidence(left_out + 1) < 0.95


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    rows = np.random.default_rng(0).lognormal(size=(2000, 15))
    held = [low <= 1.0 <= high for low, high in map(interval_of_median, rows.tolist())]
    assert 0.95 <= np.mean(held) <= 0.98  # 0.965 for 15 values


@pytest.mark.parametrize(
    ("ours", "again", "expected"),
    [
        (of(0.9), QUIET, "faster"),
        (of(1.1), QUIET, "slower"),
        (of(1.0), QUIET, "as fast"),
        (of(1.03, ONES), ONES, "slower"),
        (of(1.03, ONES), QUIET, "slower"),
        (of(1.005, ONES), QUIET, "as fast"),
        (of(0.9), BUSY, "cannot tell"),
        (of(1.0, BUSY), QUIET, "cannot tell"),
        (of(1.0), BUSY, "cannot tell"),
        (of(0.2, BUSY), BUSY, "faster"),
        (of(5.0, BUSY), BUSY, "slower"),
    ],
)
def test_verdicts(ours: list[float], again: list[float], expected: str) -> None:
    assert verdict_on(ours, again) == expected


def test_a_difference_that_torch_shows_to_itself_is_not_believed() -> None:
    assert verdict_on(of(1.08, ONES), of(1.0, ONES)) == "slower"
    assert verdict_on(of(1.08, ONES), of(1.1, ONES)) == "cannot tell"
    assert verdict_on(of(1.08, ONES), of(1 / 1.1, ONES)) == "cannot tell"


def test_the_clock_runs_while_a_call_does() -> None:
    assert 0.01 <= seconds(lambda: time.sleep(0.01), "cpu", repetitions=2) < 0.02 + 0.5
    assert host_seconds(lambda: time.sleep(0.01), "cpu") >= 0.01
