"""Verdicts under other settings are distinguished, and settings are put back."""

from __future__ import annotations

import functools

import torch

from benchmarks import checked_settings
from castwise.checking import check, record


def test_the_number_of_workers_of_a_data_loader_is_told_from_the_number_of_threads() -> None:
    train = functools.partial(checked_settings.loader, dtype=torch.float32, workers=0)
    golden = record(train, 2)
    with checked_settings.threads(2):
        assert check(train, golden).exit_code == 0
    assert check(functools.partial(train, workers=1), golden).where == "the data, or code before the model"
    before = torch.get_num_threads()
    with checked_settings.deterministic(), checked_settings.threads(before + 1):
        assert torch.are_deterministic_algorithms_enabled()
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == (False, before)


def test_verdicts_have_a_row_each_with_their_programs() -> None:
    machine = {"command": "c", "device": "d", "cores": 1, "threads": 1, "torch": "t", "python": "p", "date": "x"}
    both = {"a, float32": "identical: all bits", "b, float32": "identical: all bits"}
    apart = {"a, float32": "cannot tell: by up to 1e0; fix", "b, float32": "same"}
    rows = checked_settings.table({"machine": machine, "settings": {"one": both, "two": apart}}).splitlines()[-2:]
    assert rows == ["| one | identical |", "| two | cannot tell: by up to 1e0; fix (a, float32)<br>same (b, float32) |"]
