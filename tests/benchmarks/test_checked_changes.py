"""Changed programs that `castwise check` is tried on: each change is one, and answers are counted as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.changes.edits import SAME, Edit
from benchmarks.checked_changes import KINDS

from benchmarks import checked_changes, held_out_changes
from castwise.checking import record


@pytest.mark.parametrize("program", SAME)
def test_each_change_is_a_program_of_its_own(program: str) -> None:
    source = (checked_changes.FOLDER / f"{program}.py").read_text()
    edits = [edit for kinds in (KINDS, held_out_changes.KINDS) for kind in kinds.values() for edit in kind[program]]
    changed = [checked_changes.changed(source, edit) for edit in edits]
    assert len({source, *changed}) == len(changed) + 1
    for text in changed:
        compile(text, program, "exec")


def test_text_that_does_not_occur_once_is_refused() -> None:
    for text, times in (("one two", 0), ("one", 2)):
        with pytest.raises(ValueError, match=f"must occur once in the program, not {times} times"):
            checked_changes.changed("one one", Edit(text, ""))


def test_answers_are_those_of_the_check_and_how_far_weights_and_losses_are() -> None:
    source = (checked_changes.FOLDER / "experts.py").read_text()
    train = checked_changes.compiled(source, torch.float32)
    golden, before = record(train, checked_changes.STEPS), checked_changes.run(train)
    hashes, answers = checked_changes.hashes_of(train), {}
    for kind, edits in KINDS.items():
        edit = edits["experts"][0]
        changed = checked_changes.compiled(checked_changes.changed(source, edit), torch.float32)
        differ = checked_changes.differ(hashes, checked_changes.hashes_of(changed))
        one = checked_changes.answer(changed, golden, before, edit) | {"hashes": differ}
        assert checked_changes.is_right(kind, one), one["verdict"]
        answers[kind] = [one]
    assert answers["same"][0]["weights"] < answers["wrong"][0]["weights"]
    assert not checked_changes.differ(hashes, checked_changes.hashes_of(train))
    tests = checked_changes.flagged({"experts": answers})
    assert tests["castwise check"] == {"bugs": {"right": 1, "of": 1}, "rewrites": {"right": 0, "of": 1}}
    assert tests["hashes"] == {"bugs": {"right": 1, "of": 1}, "rewrites": {"right": 1, "of": 1}}
    counts = checked_changes.counted(answers)
    assert counts == {column: {"right": 1, "of": 1} for column in checked_changes.COLUMNS}
    bits = {"less accurate": [{**answers["less accurate"][0], "kind": "identical"}]}
    assert checked_changes.counted(answers | bits)["losses_of_precision"] == {"right": 0, "of": 0}
    lost = [{**answers["same"][0], "kind": "different"}]
    assert checked_changes.counted(answers | {"same": lost})["rewrites"] == {"right": 0, "of": 1}
    both = checked_changes.summed({"one": answers, "other": answers | {"same": lost}})
    assert (both["rewrites"], both["bugs"]) == ({"right": 1, "of": 2}, {"right": 2, "of": 2})


def test_a_record_grows_by_one_program_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = dict.fromkeys(("allclose", "assert_close", "hashes"), False)
    one = {"kind": "identical", "weights": 0.0, "losses": 0.0, "is_named": False, **tests}
    answers = {kind: [one] for kind in KINDS}
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text("<!-- changes-cpu begins -->\n<!-- changes-cpu ends -->\n")
    monkeypatch.setattr(checked_changes.recording, "HERE", tmp_path)
    for pair in ("cnn-float32", "gpt-float32", "cnn-float32"):
        checked_changes.write("changes", pair, answers)
    record = json.loads((tmp_path / "results" / "changes-cpu.json").read_text())
    assert [*record["programs"]] == ["gpt-float32", "cnn-float32"]
    assert record["all"]["rewrites"] == {"right": 2, "of": 2}
    assert checked_changes.table(record) in (tmp_path / "README.md").read_text()
