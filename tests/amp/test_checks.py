"""Checks of numbers: what passes comes out plain, and what does not is quoted with what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

from castwise.amp import _checks as checks


@pytest.mark.parametrize(
    ("check", "given", "plain"),
    [
        (lambda value: checks.real_number("x", value), 3, 3.0),
        (lambda value: checks.real_number("x", value), Fraction(1, 4), 0.25),
        (lambda value: checks.real_number("x", value), np.float32(0.5), 0.5),
        (lambda value: checks.real_number("x", value), 10**400, math.inf),
        (lambda value: checks.check_scale("x", value), 2**-126, 2.0**-126),
        (lambda value: checks.check_scale("x", value), 2**126, 2.0**126),
        (lambda value: checks.at_least("x", value, 1.0), 1, 1.0),
        (lambda value: checks.integer("x", value), np.int64(7), 7),
        (lambda value: checks.count("x", value, 2), 2, 2),
        (lambda value: checks.count("x", value, 0), 2**31 - 1, 2**31 - 1),
        (lambda value: checks.count("x", value, 0, bits=63), 2**63 - 1, 2**63 - 1),
    ],
)
def test_what_is_allowed_comes_out_as_a_plain_number(check: Callable[[Any], Any], given: Any, plain: Any) -> None:
    found = check(given)
    assert (found, type(found)) == (plain, type(plain))


OF_SCALE = "a finite number > 0, within [2**-126, 3.4e38]"


@pytest.mark.parametrize(
    ("check", "given", "error", "message"),
    [
        (checks.real_number, True, TypeError, "a number, got True of type bool"),
        (checks.real_number, "1", TypeError, "a number, got '1' of type str"),
        (checks.real_number, 1j, TypeError, "a number, got 1j of type complex"),
        *(
            (checks.check_scale, bad, ValueError, f"{OF_SCALE}, got {bad!r}")
            for bad in (0.0, -1.0, 2.0**-127, 2.0**128, math.inf, math.nan)
        ),
        *(
            (partial(checks.at_least, lowest=0.5), bad, ValueError, f"a finite number >= 0.5, got {bad}")
            for bad in (0.25, math.inf, math.nan)
        ),
        (checks.integer, 1.0, TypeError, "an integer, got 1.0 of type float"),
        (checks.integer, False, TypeError, "an integer, got False of type bool"),
        (partial(checks.count, lowest=1), 0, ValueError, "an integer in [1, 2**31), got 0"),
        (partial(checks.count, lowest=1), 2**31, ValueError, "an integer in [1, 2**31), got 2147483648"),
        (partial(checks.one_of, allowed=("a", "b")), "c", ValueError, "one of 'a', 'b', got 'c'"),
    ],
)
def test_what_is_not_is_quoted(
    check: Callable[[str, Any], Any], given: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^x must be {re.escape(message)}$"):
        check("x", given)


def test_one_of_some_words_passes() -> None:
    checks.one_of("x", "b", ("a", "b"))
