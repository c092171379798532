"""The result of `trace`: ops and casts as rows, and their totals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from castwise._shown import Block, Shown, Table

AGAIN = "cast before"
BACK = "back again"

# The numeric columns of the tables.
OP_NUMBERS, CAST_NUMBERS = {3, 4}, {4, 5}


@dataclasses.dataclass(frozen=True)
class Op:
    """Calls of one op with the same dtypes.

    Args:
        op: Name, as in `aten.mm`.
        inputs: Distinct dtypes of its floating-point tensor arguments, in argument order.
        output: Distinct dtypes of its floating-point results, in order.
        forward: Number of calls in the forward.
        backward: Number of calls in the backward.
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
        module: Qualified name of the module to which the cast belongs; "" for the model.
        phase: "forward" or "backward".
        of: Qualified name of the parameter that was cast, or "activation", or "gradient".
        source: Dtype before.
        target: Dtype after.
        redundant: "cast before" if the same values were already cast to the same dtype; "back again" if the values were
            cast from the target's dtype and not changed since; else "".
        count: Number of casts.
        nbytes: Bytes that all of them read and write.
    """

    module: str
    phase: str
    of: str
    source: str
    target: str
    redundant: str
    count: int
    nbytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Trace(Shown):
    """The ops and casts of one forward and backward; prints as a table of casts, a table of ops, and totals.

    Args:
        ops: One row per op and dtypes.
        casts: One row per module and kind, in order of first occurrence.
    """

    ops: tuple[Op, ...]
    casts: tuple[Cast, ...]

    def of_weights(self) -> tuple[int, int]:
        """Return count and bytes of the casts of parameters, which a `WeightCache` can avoid."""
        return self._total(lambda cast: cast.phase == "forward" and cast.of not in {"activation", "gradient"})

    def redundant(self) -> tuple[int, int]:
        """Return count and bytes of the redundant casts."""
        return self._total(lambda cast: cast.redundant != "")

    def as_dict(self) -> dict[str, Any]:
        """Return the trace as JSON-serializable lists and dicts."""
        totals = {"all": self._total(lambda cast: True), "weights": self.of_weights(), "redundant": self.redundant()}
        return {
            "ops": [dataclasses.asdict(op) for op in self.ops],
            "casts": [dataclasses.asdict(cast) for cast in self.casts],
            "totals": {name: {"casts": count, "nbytes": nbytes} for name, (count, nbytes) in totals.items()},
        }

    def op_rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table of ops as text, header first."""
        rows = [(row.op, row.inputs, row.output, str(row.forward), str(row.backward)) for row in self.ops]
        return [("op", "inputs", "output", "forward", "backward"), *rows]

    def cast_rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table of casts as text, header first."""
        rows = [
            (
                *(row.module or "(root)", row.phase, row.of, f"{row.source} to {row.target}"),
                *(str(row.count), f"{row.nbytes:,}", row.redundant),
            )
            for row in self.casts
        ]
        return [("module", "phase", "cast of", "dtypes", "count", "bytes", "redundant"), *rows]

    def __repr__(self) -> str:
        return f"Trace({self.summary().splitlines()[0]}, of {len(self.ops)} kinds of ops)"

    def _blocks(self) -> Iterator[Block]:
        yield Table(self.cast_rows(), CAST_NUMBERS)
        yield Table(self.op_rows(), OP_NUMBERS)
        yield self.summary()

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
