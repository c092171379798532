"""The record of a sampled step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.monitor.reduced import combined
from torch.utils._python_dispatch import TorchDispatchMode

from castwise.monitor._exchange import NoExchangeError
from castwise.monitor._exponents import Counter, count, sum_of_squares, tally
from castwise.monitor._records import Update
from castwise.monitor._reduction import Layout, layout_of
from castwise.monitor._sample import GradientTallies, Measured, sample_record
from castwise.monitor._tally import Tally
from castwise.monitor._updates import compare, compare_together


def test_a_norm_counts_copies_once_and_parts_of_ranks_together() -> None:
    ranks = [
        Measured(
            {
                "half": GradientTallies(of(1.0), of(1.0), 2, squares),
                "copy": GradientTallies(of(1.0), of(1.0), 1, 4.0),
                "own": GradientTallies(of(1.0), of(1.0), None, squares),
            }
        )
        for squares in (1.0, 5.0)
    ]
    assert sample_record(1, 1.0, combined(ranks)).grad_norm == 4.0
    assert sample_record(1, 1.0, combined(ranks), is_clipped=True).grad_norm is None
    assert sample_record(1, 1.0, Measured()).grad_norm is None


def of(*numbers: float) -> Tally:
    return tally(count(torch.tensor(numbers)))


def test_parts_add_up_and_copies_count_once() -> None:
    halves = [(of(1.0, 0.0), 2), (of(4.0), 2)]
    copies = [(of(8.0, 2.0), 1), (of(8.0, 2.0), 1)]
    own = [(of(1.0), None), (of(2.0), None)]
    ranks = [
        Measured(
            gradients={
                name: GradientTallies(part[0], part[0], part[1])
                for name, part in (("half", half), ("copy", copy), ("own", mine))
            },
            activations={"": part},
            updates={"half": numbers},
        )
        for half, copy, mine, part, numbers in zip(
            halves, copies, own, (of(1.0), of(2.0)), ([1.0, 4.0, 2.0, 1.0], [3.0, 12.0, 2.0, 0.0]), strict=True
        )
    ]
    together = combined(ranks)
    assert together.gradients["half"].scaled == of(1.0, 0.0, 4.0)
    assert together.gradients["copy"].unscaled == of(8.0, 2.0)
    assert together.gradients["own"].scaled == of(1.0, 2.0)
    assert together.activations[""] == of(1.0, 2.0)
    assert sample_record(7, 1.0, together).weights == {"half": Update(0.5, 0.25)}


def test_what_only_some_ranks_have_is_not_lost() -> None:
    first = Measured(activations={"first": of(1.0)}, dtypes={"first": "bfloat16"})
    together = combined([first, Measured(activations={"second": of(2.0)})])
    assert together.activations == {"first": of(1.0), "second": of(2.0)}
    assert together.dtypes == {"first": "bfloat16"}


def test_ranks_with_different_names_are_combined_in_order_of_first_occurrence() -> None:
    first = Measured({"a": GradientTallies(of(1.0), of(1.0), 1)}, {"x": ["a"]}, updates={"a": [1.0] * 4})
    second = Measured(
        {"b": GradientTallies(of(2.0**-30), of(2.0**30), 1, 3.0), "a": GradientTallies(of(1.0), of(1.0), 1)},
        {"y": ["b"], "x": ["a"]},
        {"out": of(0.0, float("nan"))},
        {"b": [1.0, 4.0, 1.0, float("nan")]},
    )
    together = combined([first, Measured(), second])
    assert list(together.gradients) == ["a", "b"]
    assert together.modules == {"x": ["a"], "y": ["b"]}
    assert together.gradients["a"].scaled == of(1.0)
    assert (together.gradients["b"].scaled, together.gradients["b"].unscaled) == (of(2.0**-30), of(2.0**30))
    assert together.gradients["b"].squares == 3.0
    assert together.activations == {"out": of(0.0, float("nan"))}
    assert together.updates["a"] == [1.0] * 4
    assert together.updates["b"][:3] == [1.0, 4.0, 1.0]
    assert math.isnan(together.updates["b"][3])


def test_another_shape_is_another_model() -> None:
    ranks = [Measured({"a": GradientTallies(of(1.0), of(1.0), 1, shape=shape)}) for shape in ((2, 3), None, (3, 2))]
    assert combined(ranks[:2]).gradients["a"].scaled == of(1.0)
    with pytest.raises(NoExchangeError, match=r"rank 2 trains another model: its a has shape \[3, 2\], not \[2, 3\]"):
        combined(ranks)


def test_a_norm_without_all_gradients_is_not_recorded() -> None:
    rank = Measured({"a": GradientTallies(of(1.0), of(1.0), 1, 4.0)})
    assert sample_record(1, 1.0, combined([rank, rank])).grad_norm == 2.0
    assert sample_record(1, 1.0, combined([rank, replace(rank, partial_sums=["b"])])).grad_norm is None


def test_a_layout_is_sent_as_text() -> None:
    layout = layout_of(Measured({"a": GradientTallies(of(1.0), of(1.0), None, shape=(2,))}, {"": ["a"]}, {"": of(1.0)}))
    sent = Layout.from_bytes(layout.to_bytes())
    assert sent.to_bytes() == layout.to_bytes()
    assert sent.gradients == {"a": [None, [2]]}


class CountedOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return op(*args, **(kwargs or {}))


def test_small_tensors_on_a_cpu_are_counted_and_compared_together_with_few_ops_each() -> None:
    tensors = [torch.randn(n + 1) * 10.0 ** (n - 20) for n in range(40)] + [torch.randn(2**15), torch.zeros(0)]
    moved = [tensor + 1e-3 for tensor in tensors]

    counter = Counter(with_squares=True)
    with CountedOps() as ops:
        for tensor in tensors:
            counter.add(tensor)
        measured = counter.results()
        compared = compare_together(list(zip(tensors, moved, strict=True)))
    assert ops.count < 12 * len(tensors)  # 61 each if they are measured one by one
    for tensor, after, (counts, squares), numbers in zip(tensors, moved, measured, compared, strict=True):
        assert torch.equal(counts, count(tensor))
        torch.testing.assert_close(squares, sum_of_squares(tensor), rtol=1e-14, atol=0.0)
        torch.testing.assert_close(numbers, compare(tensor, after), rtol=1e-14, atol=0.0)
