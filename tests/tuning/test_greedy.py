"""The greedy path: from the most exact to the cheapest, best bargains first, and near to the best of all choices."""

from __future__ import annotations

import itertools
import math
import random

from castwise.tuning._greedy import Choice, Option, exact_choice, path

Options = dict[str, list[Option]]


def total(options: Options, choice: Choice) -> tuple[float, float]:
    chosen = [next(each for each in of if each.format == choice[name]) for name, of in options.items()]
    return sum(each.cost for each in chosen), sum(each.effect for each in chosen)


def drawn(seed: int) -> Options:
    draw = random.Random(seed)
    options = {}
    for name in "abcdef":
        size = draw.uniform(1, 10)
        options[name] = [
            Option("float32", size, 0.0, 23),
            Option("float16", size / 2, draw.choice([math.inf, draw.uniform(0, 1)]), 10),
            Option("bfloat16", size / 2, draw.uniform(0, 4), 7),
            Option("float8", size / 4, draw.uniform(2, 40), 3),
        ]
    return options


def test_costs_fall_and_effects_rise_one_module_at_a_time() -> None:
    for seed in range(20):
        options = drawn(seed)
        choices = path(options)
        assert choices[0] == exact_choice(options) == dict.fromkeys(options, "float32")
        for before, after in itertools.pairwise(choices):
            assert sum(before[name] != after[name] for name in options) == 1
            assert total(options, after)[0] < total(options, before)[0]
            assert total(options, after)[1] >= total(options, before)[1]
        assert math.isfinite(total(options, choices[-1])[1])


def test_each_choice_on_the_path_is_the_cheapest_of_its_effect() -> None:
    for seed in range(5):
        options = drawn(seed)
        everything = [
            total(options, dict(zip(options, formats, strict=True)))
            for formats in itertools.product(*([each.format for each in of] for of in options.values()))
        ]
        for choice in path(options):
            cost, effect = total(options, choice)
            assert not any(other < cost - 1e-9 and found <= effect + 1e-12 for other, found in everything)


def test_without_effects_the_format_with_the_most_digits_is_the_first() -> None:
    options = {"a": [Option("float16", 1.0, 0.0, 10), Option("float32", 2.0, 0.0, 23)]}
    assert path(options) == [{"a": "float32"}, {"a": "float16"}]
