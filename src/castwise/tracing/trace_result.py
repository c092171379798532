"""What `trace` returns: ops and casts as rows, and their totals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from castwise._text_table import aligned

AGAIN = "cast before"
BACK = "back again"

# Which columns of the tables are numbers.
OP_NUMBERS, CAST_NUMBERS = {3, 4}, {4, 5}


@dataclasses.dataclass(frozen=True)
class Op:
    """Calls of one op with the same dtypes.

    Args:
        op: Name, as in `aten.mm`.
        inputs: Dtypes of its floating-point tensor arguments, in their order, each once.
        output: Dtypes of its floating-point results, likewise.
        forward: How often it ran in the forward.
        backward: How often it ran in the backward.
    """

    op: str
    inputs: str
    output: str
    forward: int
    backward: int


@dataclasses.dataclass(frozen=True)
class Cast:
    """Casts of one kind in one module.

    Args:
        module: Qualified name of the module whose forward cast, or has the gradient that was cast; "" for the model.
        phase: "forward" or "backward".
        of: Qualified name of the parameter that was cast, or "activation", or "gradient".
        source: Dtype before.
        target: Dtype after.
        redundant: "cast before" if the same values had been cast to the same dtype already, "back again" if they
            had come from the target's dtype by a cast with nothing computed between, else "".
        count: How many.
        nbytes: Bytes read and written by all of them.
    """

    module: str
    phase: str
    of: str
    source: str
    target: str
    redundant: str
    count: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """What `trace` has seen; as a string, a table of casts, one of ops, and totals.

    Args:
        ops: By op and dtypes.
        casts: By module and kind, in the order in which they first happened.
    """

    ops: tuple[Op, ...]
    casts: tuple[Cast, ...]

    def of_weights(self) -> tuple[int, int]:
        """Return count and bytes of the casts of parameters, which a `WeightCache` keeps while they do not change."""
        return self._total(lambda cast: cast.phase == "forward" and cast.of not in {"activation", "gradient"})

    def redundant(self) -> tuple[int, int]:
        """Return count and bytes of the redundant casts."""
        return self._total(lambda cast: cast.redundant != "")

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain lists and dicts, fit for JSON."""
        totals = {"all": self._total(lambda cast: True), "weights": self.of_weights(), "redundant": self.redundant()}
        return {
            "ops": [dataclasses.asdict(op) for op in self.ops],
            "casts": [dataclasses.asdict(cast) for cast in self.casts],
            "totals": {name: {"casts": count, "nbytes": nbytes} for name, (count, nbytes) in totals.items()},
        }

    def op_rows(self) -> list[tuple[str, ...]]:
        """Return the table of ops as text, its header first."""
        rows = [(row.op, row.inputs, row.output, str(row.forward), str(row.backward)) for row in self.ops]
        return [("op", "inputs", "output", "forward", "backward"), *rows]

    def cast_rows(self) -> list[tuple[str, ...]]:
        """Return the table of casts as text, its header first."""
        rows = [
            (
                *(row.module or "(root)", row.phase, row.of, f"{row.source} to {row.target}"),
                *(str(row.count), f"{row.nbytes:,}", row.redundant),
            )
            for row in self.casts
        ]
        return [("module", "phase", "cast of", "dtypes", "count", "bytes", "redundant"), *rows]

    def __str__(self) -> str:
        tables = [
            aligned(rows, right) for rows, right in ((self.cast_rows(), CAST_NUMBERS), (self.op_rows(), OP_NUMBERS))
        ]
        return "\n\n".join([*tables, self.summary()])

    def summary(self) -> str:
        """Return the totals as three lines."""
        (count, nbytes), of_weights, redundant = self._total(lambda cast: True), self.of_weights(), self.redundant()
        return "\n".join(
            [
                f"{count} casts, {nbytes:,} bytes",
                f"{of_weights[0]} of weights, {of_weights[1]:,} bytes: a WeightCache keeps these",
                f"{redundant[0]} redundant, {redundant[1]:,} bytes",
            ]
        )

    def _total(self, which: Callable[[Cast], bool]) -> tuple[int, int]:
        rows = [cast for cast in self.casts if which(cast)]
        return sum(cast.count for cast in rows), sum(cast.nbytes for cast in rows)
