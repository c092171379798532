"""Check changed training programs against recordings of the programs as they were, and count the right answers.

    python -m benchmarks.checked_changes             # every program in every dtype
    python -m benchmarks.checked_changes gpt-float32 # some of them; the others stay as they were recorded

The programs, and rewrites, losses of precision and bugs of each, are in benchmarks/changes. The table compares
`castwise check` with two usual tests: final weights, and losses, within a tolerance. Their tolerance is the smallest at
which no rewrite of that program in that dtype is called wrong, which nobody knows in advance. A second table has usual
tests with their own tolerances. Writes benchmarks/results/checked_changes-cpu.json and the tables in
benchmarks/README.md. Takes about half an hour.
"""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._debug_mode import DebugMode  # a rival, which is private

from benchmarks import recording
from benchmarks.changes.edits import LESS_ACCURATE, SAME, WRONG, Edit
from castwise.checking import CheckResult, Golden, check, record

Kinds = dict[str, dict[str, list[Edit]]]
KINDS: Kinds = {"same": SAME, "less accurate": LESS_ACCURATE, "wrong": WRONG}
FOLDER = Path(__file__).parent / "changes"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EVERY = [f"{program}-{dtype}" for program in SAME for dtype in DTYPES]
STEPS = 3
COLUMNS = {
    "rewrites": "rewrites called the same",
    "bugs": "bugs called different",
    "named": "of these, named",
    "losses_of_precision": "losses of precision found",
    "by_weights": "bugs beyond every rewrite's weights",
    "by_losses": "bugs beyond every rewrite's losses",
}
TESTS = {
    "castwise check": "`castwise check`",
    "allclose": "`torch.allclose`, final weights",
    "assert_close": "`torch.testing.assert_close`, final weights",
    "losses": "losses, within 1e-3 of their size",
    "hashes": "hashes of all ops, `torch.utils._debug_mode`",
}
Run = tuple[dict[str, torch.Tensor], list[float]]
"""What a program computes: its weights by name, and its losses."""


def main(script: str = "checked_changes", kinds: Kinds = KINDS) -> None:
    """Check what is asked for, and write the table of all.

    Args:
        script: What names the record, the table and the command.
        kinds: The changes of each kind, by program.
    """
    chosen = chosen_of(EVERY)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for pair, answers in zip(chosen, pool.imap(functools.partial(checked, kinds=kinds), chosen), strict=True):
            record = write(script, pair, answers)
    print(table(record))


def chosen_of(every: list[str]) -> list[str]:
    """Return the arguments of the command, or all that there is; set what all of these benchmarks set."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or every
    if unknown := set(chosen) - set(every):
        sys.exit(f"choose from {', '.join(every)}, not {', '.join(sorted(unknown))}")
    return chosen


def write(script: str, pair: str, answers: dict[str, Any]) -> dict[str, Any]:
    """Write the answers for a program in one dtype to the record, and return all of it."""
    result = recording.HERE / "results" / f"{script}-cpu.json"
    known = json.loads(result.read_text())["programs"] if result.exists() else {}
    programs = {each: answers if each == pair else known[each] for each in EVERY if each == pair or each in known}
    machine = recording.machine() | {"command": f"python -m benchmarks.{script}"}
    tests = flagged(programs)
    of_dtype = {dtype: [name for name in programs if name.endswith(f"-{dtype}")] for dtype in DTYPES}
    dtypes = {dtype: summed({name: programs[name] for name in names}) for dtype, names in of_dtype.items()}
    about = {"machine": machine, "all": summed(programs), "tests": tests, "dtypes": dtypes, "programs": programs}
    recording.write(result.stem, about, table(about))
    return about


def checked(pair: str, kinds: Kinds) -> dict[str, Any]:
    """Check all changes of a program in one dtype, such as "gpt-float32"."""
    program, dtype = pair.split("-")
    source = (FOLDER / f"{program}.py").read_text()
    train = compiled(source, DTYPES[dtype])
    golden, before, hashes = record(train, STEPS), run(train), hashes_of(train)
    gc.freeze()  # the check looks for models among all objects, of which torch's compiler has 200,000
    answers: dict[str, Any] = {}
    for kind, edits in kinds.items():
        answers[kind] = []
        for edit in edits[program]:
            changed_train = compiled(changed(source, edit), DTYPES[dtype])
            tests = {"hashes": differ(hashes, hashes_of(changed_train))}
            answers[kind].append(answer(changed_train, golden, before, edit) | tests)
        for edit, one in zip(edits[program], answers[kind], strict=True):
            if not is_right(kind, one) or (kind == "wrong" and not one["is_named"]):
                print(f"{program}, {dtype}, {kind}: {edit.new.strip()!r}: {one['verdict']}", flush=True)
    return answers


def changed(source: str, edit: Edit) -> str:
    """Return a program with a change."""
    if source.count(edit.old) != 1:
        raise ValueError(f"{edit.old!r} must occur once in the program, not {source.count(edit.old)} times")
    return source.replace(edit.old, edit.new)


def compiled(source: str, dtype: torch.dtype) -> Callable[[Any], Any]:
    """Return the function `train` of a program."""
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, "program", "exec"), names)
    names["DTYPE"] = dtype
    train: Callable[[Any], Any] = names["train"]
    return train


def run(train: Callable[[Any], Any]) -> Run:
    """Run a program as it is."""
    model, losses = train(lambda name, tensor: None)
    return {unwrapped(name): param.detach() for name, param in model.named_parameters()}, losses


def hashes_of(train: Callable[[Any], Any]) -> list[Any]:
    """Return the hashes of the results of all ops that a program runs."""
    with DebugMode() as mode, DebugMode.log_tensor_hashes():
        run(train)
    return list(mode.logs)


def differ(before: list[Any], now: list[Any]) -> bool:
    """Return True if ops or their hashes differ."""
    try:
        return bool(DebugMode.check_hash_mismatches(before, now))
    except ValueError:  # other ops
        return True


def answer(train: Callable[[Any], Any], golden: Golden, before: Run, edit: Edit) -> dict[str, Any]:
    """Return what the check says of a program, and how far its weights and losses are from those before the change."""
    result: CheckResult = check(train, golden)
    weights, losses = run(train)
    pairs = pairs_of(before[0], weights)
    return {
        "kind": result.kind,
        "verdict": result.verdict,
        "is_named": edit.place in (result.where or ""),
        "weights": farthest(before[0], weights),
        "losses": farthest({"": torch.tensor(before[1])}, {"": torch.tensor(losses)}),
        "allclose": pairs is None or not all(torch.allclose(*pair) for pair in pairs),
        "assert_close": pairs is None or not all(is_close(*pair) for pair in pairs),
    }


def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if `torch.testing.assert_close` passes."""
    try:
        torch.testing.assert_close(one, other)
    except AssertionError:
        return False
    return True


def farthest(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of an element, relative to the largest element of its tensor."""
    pairs = pairs_of(before, now)
    if pairs is None:
        return sys.float_info.max
    return max(float((one - other).abs().max() / one.abs().max().clamp(min=1e-12)) for one, other in pairs)


def pairs_of(
    before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Return tensors of the same names; None if they have other names or shapes."""
    if sorted(before) != sorted(now) or any(one.shape != now[name].shape for name, one in before.items()):
        return None
    return [(one, now[name]) for name, one in before.items()]


def unwrapped(name: str) -> str:
    """Return a parameter's name without the wrapper of `torch.compile`."""
    return name.removeprefix("_orig_mod.")


def is_right(kind: str, one: dict[str, Any]) -> bool:
    """Return True if the answer fits the kind of change."""
    right = {"same": {"identical", "same"}, "less accurate": {"less accurate"}, "wrong": {"different"}}
    return one["kind"] in right[kind]


def table(about: dict[str, Any]) -> str:
    """Return a row for each program and dtype, and one for all."""
    rows = [f"| program, dtype | {' | '.join(COLUMNS.values())} |", f"|{'---|' * 7}"]
    counts = {pair.replace("-", ", "): counted(answers) for pair, answers in about["programs"].items()}
    for name, of_row in (counts | {"all": about["all"]}).items():
        rows.append(f"| {name} | {' | '.join('{right} of {of}'.format(**of_row[column]) for column in COLUMNS)} |")
    rows += ["", "| test | bugs that fail it | rewrites that fail it |", "|---|---|---|"]
    for test, of_test in about.get("tests", {}).items():
        cells = (f"{of_test[kind]['right']} of {of_test[kind]['of']}" for kind in ("bugs", "rewrites"))
        rows.append(f"| {TESTS[test]} | {' | '.join(cells)} |")
    return "\n".join([recording.headline(about["machine"]), "", *rows])


def flagged(programs: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """Return for each test how many bugs and how many rewrites fail it."""
    fails: dict[str, Callable[[dict[str, Any]], bool]] = {
        "castwise check": lambda one: one["kind"] not in ("same", "identical"),
        "allclose": lambda one: one["allclose"],
        "assert_close": lambda one: one["assert_close"],
        "losses": lambda one: one["losses"] > 1e-3,
        "hashes": lambda one: one["hashes"],
    }
    kinds = {
        name: [one for answers in programs.values() for one in answers[kind] if "hashes" in one]
        for name, kind in (("bugs", "wrong"), ("rewrites", "same"))
    }
    return {
        test: {name: {"right": sum(map(fail, ones)), "of": len(ones)} for name, ones in kinds.items()}
        for test, fail in fails.items()
    }


def counted(answers: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return for each column of the table how many of how many."""
    same, less, wrong = (answers[kind] for kind in ("same", "less accurate", "wrong"))
    found = [one for one in wrong if is_right("wrong", one)]
    of_column = {
        "rewrites": [is_right("same", one) for one in same],
        "bugs": [is_right("wrong", one) for one in wrong],
        "named": [one["is_named"] for one in found],
        # What leaves all bits as they are, such as a cast that autocast makes anyway, loses nothing.
        "losses_of_precision": [is_right("less accurate", one) for one in less if one["kind"] != "identical"],
        "by_weights": [one["weights"] > max(other["weights"] for other in same) for one in wrong],
        "by_losses": [one["losses"] > max(other["losses"] for other in same) for one in wrong],
    }
    return {column: {"right": sum(right), "of": len(right)} for column, right in of_column.items()}


def summed(programs: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the counts of all programs together."""
    counts = [counted(answers) for answers in programs.values()]
    return {column: {key: sum(one[column][key] for one in counts) for key in ("right", "of")} for column in COLUMNS}


if __name__ == "__main__":
    main()
