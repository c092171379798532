"""Changes of programs are named by the ops that differ, in the changed line or module, and are counted so."""

from __future__ import annotations

import pytest
from benchmarks.changes.edits import LESS_ACCURATE, WRONG, Edit
from benchmarks.checked_changes import FOLDER, changed

from benchmarks import named_ops
from castwise.checking._ops import differences

SOURCE = (FOLDER / "experts.py").read_text()


@pytest.mark.parametrize("edit", [WRONG["experts"][15], LESS_ACCURATE["experts"][2]])
def test_a_change_is_named_in_its_line_or_module(edit: Edit) -> None:
    ops = [named_ops.ops(source, "bfloat16") for source in (SOURCE, changed(SOURCE, edit))]
    found = differences(*ops).as_dict()
    assert named_ops.is_named(found, SOURCE, edit)
    elsewhere = found["differences"][0] | {"place": "program:1", "modules": ("tail",)}
    assert not named_ops.is_named({"differences": [elsewhere], "first_result": None}, SOURCE, edit)


def test_what_runs_the_same_ops_with_the_same_results_is_no_loss() -> None:
    one = {"first": ["x"], "first_result": None, "is_named": True, "rounds_more": True}
    same = {"first": [], "first_result": None, "is_named": False, "rounds_more": False}
    counts = named_ops.counted([{"bugs": [one, same], "losses_of_precision": [one, same], "rewrites": [same]}])
    assert counts == {
        "bugs": {"right": 1, "of": 2},
        "losses_of_precision": {"right": 1, "of": 1},
        "rounding": {"right": 1, "of": 1},
        "rewrites": {"right": 0, "of": 1},
    }
