"""Facts of steps find the iteration they belong to by its number, however late they come and whatever is left out."""

from __future__ import annotations

import torch

from castwise.amp import StepFacts
from castwise.monitor._iterations import Iterations, MonitoredIteration


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def of(optimizer: torch.optim.Optimizer, iteration: int) -> StepFacts:
    return StepFacts(iteration, optimizer, scale=1.0, skipped=False, iteration=iteration)


def numbers(iterations: Iterations) -> list[int]:
    return [iteration.number for iteration in iterations.over()]


def test_facts_that_come_late_find_their_iteration() -> None:
    one, started = optimizer(), list[MonitoredIteration]()
    iterations = Iterations(1, started.append)
    for number in (1, 2, 3):
        iterations.note_gradients(one, number)
    assert [iterations.note_facts(one, of(one, number)) for number in (1, 2)] == started[:2]
    assert numbers(iterations) == [1, 2]


def test_an_iteration_of_which_no_facts_come_is_dropped() -> None:
    one, started = optimizer(), list[MonitoredIteration]()
    iterations = Iterations(1, started.append)
    for number in (1, 2, 3):  # the first two are left out, or a checkpoint is loaded before their facts are there
        iterations.note_gradients(one, number)
    assert iterations.note_facts(one, of(one, 3)) is started[2]
    assert numbers(iterations) == [3]
    iterations.note_gradients(one, 4)
    assert iterations.note_facts(one, of(one, 4)) is started[3]


def test_an_optimizer_that_is_left_out_does_not_hold_up_the_others() -> None:
    one, other, started = optimizer(), optimizer(), list[MonitoredIteration]()
    iterations = Iterations(2, started.append)
    for number in (1, 2):
        iterations.note_gradients(one, number)
        iterations.note_gradients(other, number)
    assert iterations.note_facts(other, of(other, 1)) is started[0]
    assert numbers(iterations) == []
    assert iterations.note_facts(one, of(one, 2)) is started[1]
    assert numbers(iterations) == [1]
    iterations.note_facts(other, of(other, 2))
    assert numbers(iterations) == [2]


def test_one_that_was_left_out_begins_anew() -> None:
    one, other, started = optimizer(), optimizer(), list[MonitoredIteration]()
    iterations = Iterations(2, started.append)
    iterations.note_gradients(one, 1)
    iterations.note_gradients(other, 2)
    iterations.note_facts(other, of(other, 2))
    assert iterations.note_gradients(one, 3) is started[1]


def test_of_a_step_that_was_begun_twice_the_last_time_counts() -> None:
    one, started = optimizer(), list[MonitoredIteration]()
    iterations = Iterations(1, started.append)
    for _ in range(2):  # as when a step raises, and is taken again
        iterations.note_gradients(one, 1)
    assert iterations.note_facts(one, of(one, 1)) is started[1]


def test_facts_of_what_was_not_seen_belong_nowhere() -> None:
    one = optimizer()
    iterations = Iterations(1, lambda _: None)
    assert iterations.note_facts(one, of(one, 1)) is None
