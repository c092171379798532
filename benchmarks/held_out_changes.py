"""Check changed training programs as `checked_changes` does, with changes written after all limits were fixed.

    python -m benchmarks.held_out_changes             # every program in every dtype
    python -m benchmarks.held_out_changes gpt-float32 # some of them; the others stay as they were recorded

The changes are in benchmarks/changes/held_out.py. Writes benchmarks/results/held_out_changes-cpu.json and the tables in
benchmarks/README.md. Takes about five minutes.
"""

from benchmarks.changes.held_out import LESS_ACCURATE, SAME, WRONG
from benchmarks.checked_changes import Kinds, main, table

__all__ = ["KINDS", "table"]
KINDS: Kinds = {"same": SAME, "less accurate": LESS_ACCURATE, "wrong": WRONG}

if __name__ == "__main__":
    main("held_out_changes", KINDS)
