"""No measured figure is typed into README or manual: it comes from a result file, or from the script that found it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted({ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/writing.md"})

_UNIT = r"(?:ns|us|µs|ms|s|sec|%|percent|x|times|[KMG]i?B|[KMG]B/s|G?FLOPS?|GFLOP/s|tokens/s)"
_TIME = r"(?:seconds?|minutes?|hours?)"
_WORD = r"(?:an?|one|two|three|four|five|six|seven|eight|nine|ten|twenty|hundred)"
# A number with a unit, a span of time in words, or in a table a decimal number that is no version.
FIGURE = re.compile(
    rf"(?<![\w.^/-])(?:\d[\d,.]*[ ]?(?:{_UNIT}|{_TIME})|{_WORD} {_TIME})(?![\w/])"
    r"|(?:(?<=[|(] )|(?<=\())\d+\.\d+(?![\w.])",
    re.I,
)
NOT_PROSE = [
    r"^(?P<fence>`{3,}).*?^(?P=fence)[ ]*$",  # code
    r"<!-- (?P<name>[\w-]+) begins -->.*?<!-- (?P=name) ends -->",  # written by a script
    r"<!--.*?-->",
    r"\{\w+\}`[^`]*`",  # roles, {result} among them
    r"(?<!`)(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)",
    r"\b(?:torch|Python|castwise) (?:>= )?\d+\.\d+",
]

MODEL = {ranks: 2 * math.ceil(math.log2(ranks)) for ranks in (8, 1024, 16384, 100_000)}
ALPHAS = (2, 5, 20)

# What is defined, promised or assumed, not measured; each is somewhere on that page.
DEFINITIONS = {
    "docs/integrations/doctor.md": {
        *("10%", "1.5 times"),  # what decides on a verdict
        "a second",  # operations
    },
    "docs/integrations/run.md": {
        "5%",  # of lost updates, from where on it is a mistake
        *(
            "10 minutes",
            "10 seconds",
            "one minute",
        ),  # limits: between ranks, of one launch too, and from SIGTERM to the end
        "a second",  # model, launch
    },
    "docs/reference/invariants.md": {"1.48 times", "1.5 times"},  # a sigma, and a jump of the learning rate
    "docs/reference/formats.md": {
        "64 times",
        "a second",
        "A second",
    },  # limits of a size and of a pause; a second writer
    "docs/reference/check.md": {"100 times", "3 times", "50 times", "6 times"},  # limits of the verdicts, and aims
    "docs/tutorials/numerics-in-ci.md": {"200 kB"},  # the largest size of a file, which a test asserts
    "docs/explanation/number-formats.md": {
        *("0.5", "1.5"),  # numbers that e2m1 has
        *("4.25", "6.25", "8.25"),  # bits: of an element, and an eighth of one of its block's scale
        *("0.001", "1.0"),  # an update that is lost; the version of a specification
    },
    "docs/explanation/recipes.md": {"1 x", "128 x"},  # blocks that share a scale
    "docs/howto/replay.md": {"256 MiB"},  # the limit of a capsule
    "docs/howto/team.md": {"256 MiB"},
    "docs/tutorials/lora.md": {"0.5%", "64 KiB"},  # what a region of a WeightCache compares at most
    # What `make coverage` and a command ask for, and the limit of a test.
    "docs/explanation/testing.md": {"95%", "200 times", "120 s"},
    "docs/explanation/master-weights.md": {"0.1%", "a second"},  # 1 - beta2; moment
    "docs/tutorials/less-memory.md": {"4 MiB"},  # the size of a bucket of MasterWeights
    "docs/tutorials/mixed-precision.md": {"five minutes"},  # to read it
    # A model on paper: alphas are assumed, and times follow from the formula, as do shares of a step of 1 s or 10 ms.
    "docs/explanation/ranks.md": {
        *(f"{hops * alpha} us" for hops in MODEL.values() for alpha in ALPHAS),
        *(f"{alpha} us" for alpha in ALPHAS),
        *("1 s", "10 ms", f"{100 * MODEL[100_000] * 5e-6:.2f}%", f"{100 * MODEL[100_000] * 5e-6 / 10e-3:.1f}%"),
        *("25 GB/s", "a second"),
        *("2 KB", "5 s"),  # the size of an error, and how long ranks wait for each other's
        *("9 s", "10 s"),  # how long monitors wait for each other
    },
}


def prose(text: str) -> str:
    for pattern in NOT_PROSE:
        text = re.sub(pattern, " ", text, flags=re.M | re.S)
    return text


def figures(text: str) -> set[str]:
    return set(FIGURE.findall(prose(text)))


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_no_measured_figure_is_typed(page: Path) -> None:
    known = DEFINITIONS.get(str(page.relative_to(ROOT)), set())
    assert figures(page.read_text()) - known == set()


@pytest.mark.parametrize(
    "typed", ["takes 40.6 ms", "0.5% slower", "5.4x faster", "4 times", "two seconds", "46 GB/s", "| 2.18 | a"]
)
def test_a_typed_figure_is_found(typed: str) -> None:
    assert len(figures(f"It {typed}, as was seen.")) == 1


@pytest.mark.parametrize(
    "quoted",
    [
        "takes {result}`step_cost-cpu.json#/a|.1f` ms",
        "`sleep 5 s`",
        "```sh\nsleep 5 s\n```",
        "<!-- x begins -->\n5 ms\n<!-- x ends -->",
        "2^-126 steps",
        "16 bytes",
    ],
)
def test_what_is_quoted_or_no_figure_is_left(quoted: str) -> None:
    assert figures(quoted) == set()
