"""`CheckResult`: the answer of a check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from castwise._shown import Block, Shown

Kind = Literal["identical", "same", "less accurate", "different", "cannot tell"]
SAME, DIFFERENT, CANNOT_TELL = 0, 1, 125


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of one value in the program's own dtypes.

    Args:
        value: The value, such as "gradient of head.weight, step 1", or the module.
        error: Its relative error against float64 now.
        recorded: The same error in the golden.
        spread: The largest error of the golden's runs with random rounding; None for a module.
        allowed: How many times the larger of `recorded` and `spread` the error may be.
        ratio: How many times it is.
    """

    value: str
    error: float
    recorded: float
    spread: float | None
    allowed: float
    ratio: float


@dataclass(frozen=True, repr=False)
class CheckResult(Shown):
    """The answer of `check`; prints as the verdict and the numbers it rests on.

    Args:
        kind: "identical": all bits are the same. "same": the same function, as accurate. "less accurate": the same
            function, with larger rounding errors. "different": another function. "cannot tell": see `verdict`.
        verdict: The answer in one line, which names the place.
        where: The module, or "loss", "optimizer", ... where the first difference is; None if there is none.
        difference: Largest relative difference in float64; None if it was not measured.
        accuracy: The least accurate value, compared with what is allowed; None if it was not measured.
        compared: Values that were compared in float64.
        left_out: Values that were not, because they are rounding noise.
        notes: What else is to know.
    """

    kind: Kind
    verdict: str
    where: str | None = None
    difference: float | None = None
    accuracy: Accuracy | None = None
    compared: int = 0
    left_out: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def exit_code(self) -> int:
        """0 if the function is the same and as accurate, 1 if not, 125 if the check cannot tell."""
        return {"identical": SAME, "same": SAME, "cannot tell": CANNOT_TELL}.get(self.kind, DIFFERENT)

    def __repr__(self) -> str:
        return f"CheckResult({self.kind}: {self.verdict})"

    def _blocks(self) -> Iterator[Block]:
        yield "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the verdict and the numbers it rests on."""
        lines = [self.verdict]
        if self.difference is not None:
            differ = "value differs" if self.compared == 1 else "values differ"
            left_out = f"; {self.left_out} left out as rounding noise" if self.left_out else ""
            lines.append(
                f"  in float64: {self.compared} {differ} by at most {self.difference:.1e} "
                f"(the same: up to 1e-10, different: above 1e-08){left_out}"
            )
        if (found := self.accuracy) is not None:
            spread = "" if found.spread is None else f", {found.spread:.1e} with random rounding"
            lines.append(
                f"  error against float64: {found.error:.1e} in {found.value}; recorded: {found.recorded:.1e}{spread}; "
                f"{found.ratio:.3g} x, allowed are {found.allowed:g} x"
            )
        return lines + [f"  note: {note}" for note in self.notes]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and the exit code, for JSON."""
        return {**asdict(self), "exit_code": self.exit_code}
