"""`schedules.Dynamic`: its arithmetic is torch's, its numbers are checked, its scale stays usable."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy
import pytest
import torch

from castwise.amp.checks import MAX_SCALE, MIN_SCALE
from castwise.amp.schedules import Dynamic, Met

REFUSED = [
    ("init_scale", 0.0, ValueError, "init_scale must be a finite number > 0, within [2**-126, 2**126], got 0.0"),
    ("init_scale", -1, ValueError, "init_scale must be a finite number > 0, within [2**-126, 2**126], got -1"),
    ("init_scale", math.inf, ValueError, "init_scale must be a finite number > 0, within [2**-126, 2**126], got inf"),
    ("init_scale", math.nan, ValueError, "init_scale must be a finite number > 0, within [2**-126, 2**126], got nan"),
    ("init_scale", 1e-40, ValueError, "init_scale must be a finite number > 0, within [2**-126, 2**126], got 1e-40"),
    ("init_scale", 2.0**127, ValueError, "init_scale must be a finite number > 0, within [2**-126, 2**126], got 1.7"),
    ("init_scale", "1024", TypeError, "init_scale must be a number, got '1024' of type str"),
    ("init_scale", True, TypeError, "init_scale must be a number, got True of type bool"),
    ("growth_factor", 1.0, ValueError, "growth_factor must be a finite number > 1, got 1.0"),
    ("growth_factor", math.inf, ValueError, "growth_factor must be a finite number > 1, got inf"),
    ("growth_factor", math.nan, ValueError, "growth_factor must be a finite number > 1, got nan"),
    ("backoff_factor", 0.0, ValueError, "backoff_factor must be in (0, 1), got 0.0"),
    ("backoff_factor", 1.0, ValueError, "backoff_factor must be in (0, 1), got 1.0"),
    ("backoff_factor", -1, ValueError, "backoff_factor must be in (0, 1), got -1"),
    ("backoff_factor", math.nan, ValueError, "backoff_factor must be in (0, 1), got nan"),
    ("growth_interval", 0, ValueError, "growth_interval must be an integer in [1, 2**63), got 0"),
    ("growth_interval", -5, ValueError, "growth_interval must be an integer in [1, 2**63), got -5"),
    ("growth_interval", 2**63, ValueError, "growth_interval must be an integer in [1, 2**63), got 9223372036854775808"),
    ("growth_interval", 10.0, TypeError, "growth_interval must be an integer, got 10.0 of type float"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), REFUSED)
def test_numbers_that_cannot_work_are_refused(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Dynamic(**{name: value})


def test_numbers_of_other_types_that_work_are_accepted() -> None:
    schedule = Dynamic(numpy.float32(4.0), 3, numpy.float64(0.25), numpy.int64(7))
    scale, tracker = torch.tensor(4.0), torch.tensor(6, dtype=torch.int32)
    schedule.advance_(scale, {"growth_tracker": tracker}, Met(torch.tensor(0.0)))
    assert scale.item() == 12.0


@pytest.mark.parametrize(
    ("tracker", "found_inf", "scale_after", "tracker_after"),
    [(0, 0.0, 8.0, 1), (1, 0.0, 8.0, 2), (2, 0.0, 24.0, 0), (2, 1.0, 2.0, 0), (0, 1.0, 2.0, 0), (1, 2.0, 2.0, 0)],
)
def test_the_rule_of_the_docstring(tracker: int, found_inf: float, scale_after: float, tracker_after: int) -> None:
    scale, growth_tracker = torch.tensor(8.0), torch.tensor(tracker, dtype=torch.int32)
    Dynamic(8.0, 3.0, 0.25, 3).advance_(scale, {"growth_tracker": growth_tracker}, Met(torch.tensor(found_inf)))
    assert (scale.item(), growth_tracker.item()) == (scale_after, tracker_after)


@pytest.mark.parametrize(("found_inf", "bound"), [(1.0, MIN_SCALE), (0.0, MAX_SCALE)])
def test_the_scale_stays_where_it_and_its_reciprocal_are_finite_normal_numbers(found_inf: float, bound: float) -> None:
    scale, growth_tracker = torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)
    tiny = torch.finfo(torch.float32).tiny
    for _ in range(300):
        Dynamic(growth_interval=1).advance_(scale, {"growth_tracker": growth_tracker}, Met(torch.tensor(found_inf)))
        assert tiny <= scale.item() < math.inf
        assert tiny <= scale.reciprocal().item() < math.inf
    assert scale.item() == bound
