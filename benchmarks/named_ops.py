"""Compare the ops of changed training programs with those of the programs as they were: is the change named?

    python -m benchmarks.named_ops             # every program in float32 and bfloat16
    python -m benchmarks.named_ops gpt-float32 # some of them; the others stay as they were recorded

The programs and their changes are those of `checked_changes`. A change is named if the first difference, or the first
op with other results, is in the line that was changed, or in the module or optimizer that the change is about. Writes
benchmarks/results/named_ops-cpu.json and the table in benchmarks/README.md. Takes about ten minutes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import recording
from benchmarks.changes.edits import LESS_ACCURATE, SAME, WRONG, Edit
from benchmarks.checked_changes import DTYPES, FOLDER, changed, chosen_of, compiled
from castwise.checking._measuring import Plan, measure
from castwise.checking._ops import OpCall, differences

EVERY = [f"{program}-{dtype}" for program in SAME for dtype in ("float32", "bfloat16")]
RESULT = Path(__file__).parent / "results" / "named_ops-cpu.json"
KINDS = {"bugs": WRONG, "losses_of_precision": LESS_ACCURATE, "rewrites": SAME}
COLUMNS = {
    "bugs": "bugs named",
    "losses_of_precision": "losses of precision named",
    "rounding": "of these, as coarser rounding",
    "rewrites": "rewrites in which ops differ",
}


def main() -> None:
    """Compare what is asked for, and write the table of all."""
    chosen = chosen_of(EVERY)
    known = json.loads(RESULT.read_text())["programs"] if RESULT.exists() else {}
    for pair in chosen:
        known[pair] = compared(*pair.split("-"))
        programs = {name: known[name] for name in EVERY if name in known}
        machine = recording.machine() | {"command": "python -m benchmarks.named_ops"}
        about = {"machine": machine, "all": counted([*programs.values()]), "programs": programs}
        recording.write(RESULT.stem, about, table(about))
    print(table(about))


def compared(program: str, dtype: str) -> dict[str, Any]:
    """Return what is said of each change of a program in one dtype."""
    source = (FOLDER / f"{program}.py").read_text()
    before = ops(source, dtype)
    answers: dict[str, Any] = {}
    for kind, edits in KINDS.items():
        answers[kind] = []
        for edit in edits[program]:
            found = differences(before, ops(changed(source, edit), dtype))
            answers[kind].append(
                {
                    "first": [str(difference) for difference in found.differences[:1]],
                    "first_result": found.first_result,
                    "is_named": is_named(found.as_dict(), source, edit),
                    "rounds_more": any(difference.rounds_more for difference in found.differences),
                }
            )
    return answers


def ops(source: str, dtype: str) -> list[OpCall]:
    """Return the ops that a program runs in two steps."""
    return measure(compiled(source, DTYPES[dtype]), Plan("ops", steps=2)).ops


def is_named(found: dict[str, Any], source: str, edit: Edit) -> bool:
    """Return True if the first difference, or the first op with other results, is where the program was changed."""
    first = 1 + source[: source.index(edit.old)].count("\n")
    lines = [f"program:{line}" for line in range(first, first + 1 + edit.new.rstrip("\n").count("\n"))]
    for difference in found["differences"][:1]:
        modules = [module or "the model" for module in difference["modules"]]
        parts = [*modules, difference["phase"]]
        if difference["place"] in lines or (edit.place and any(part.startswith(edit.place) for part in parts)):
            return True
    result = found["first_result"] or ""
    return any(f"({line})" in result for line in lines) or bool(edit.place and result.startswith(edit.place))


def counted(programs: list[dict[str, list[dict[str, Any]]]]) -> dict[str, dict[str, int]]:
    """Return for each column of the table how many of how many."""
    bugs, losses, rewrites = ([one for program in programs for one in program[kind]] for kind in KINDS)
    # What runs the same ops with the same results, such as a cast that autocast makes anyway, loses nothing.
    losses = [one for one in losses if one["first"] or one["first_result"]]
    named = [one for one in losses if one["is_named"]]
    of_column = {
        "bugs": [one["is_named"] for one in bugs],
        "losses_of_precision": [one["is_named"] for one in losses],
        "rounding": [one["rounds_more"] for one in named],
        "rewrites": [bool(one["first"]) for one in rewrites],
    }
    return {column: {"right": sum(right), "of": len(right)} for column, right in of_column.items()}


def table(about: dict[str, Any]) -> str:
    """Return a row for each program and dtype, and one for all."""
    rows = [f"| program, dtype | {' | '.join(COLUMNS.values())} |", f"|{'---|' * (1 + len(COLUMNS))}"]
    counts = {pair.replace("-", ", "): counted([answers]) for pair, answers in about["programs"].items()}
    for name, of_row in (counts | {"all": about["all"]}).items():
        rows.append(f"| {name} | {' | '.join('{right} of {of}'.format(**of_row[column]) for column in COLUMNS)} |")
    return "\n".join([recording.headline(about["machine"]), "", *rows])


if __name__ == "__main__":
    main()
