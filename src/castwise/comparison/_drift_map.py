"""The heat map of a comparison's page: the error and the effect of each module under each policy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from castwise._number_text import several
from castwise._shown import Tile, Tiles

if TYPE_CHECKING:
    from castwise.comparison._drift import ModuleDrift, PolicyDrift

# Colours from the least to the largest value. They span at least a factor of four, so that values which are nearly
# equal look so, and no more than formats differ by, so that a tiny value, such as that of a module in fp32, does not
# take all contrast from the others. Under one policy, modules differ less.
STEPS = 8
_LEAST_RANGE, _LARGEST_RANGE, _LARGEST_OF_ONE = 4.0, 1e3, 10.0
MEASURES = {"introduced": "Error introduced", "shift": "Loss shift"}
_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Value:
    """A number in a cell.

    Args:
        text: The number, "inf", or a dash if it is not known.
        look: The name of its look: "0" to "8" for zero and the colours, "bad" for inf, "none" for a dash.
    """

    text: str
    look: str


@dataclass(frozen=True)
class Cell:
    """A module under a policy.

    Args:
        values: Its numbers by measure.
        format: Where it differs from the policy's own format, what a rule gives the module, or "returns ..." with the
            dtypes of its outputs.
        title: All that is known of it, as a sentence.
        is_chosen: Whether `tune` chose this format for the module.
    """

    values: Mapping[str, Value]
    format: str
    title: str
    is_chosen: bool


@dataclass(frozen=True)
class Row:
    """A module.

    Args:
        name: Its name.
        type: Its type.
        ranks: Its position by measure, from 0; the largest number over all policies comes first.
        cells: A cell for each policy.
    """

    name: str
    type: str
    ranks: Mapping[str, int]
    cells: Sequence[Cell]


@dataclass(frozen=True)
class HeatMap:
    """Modules by policies.

    The loss shift is `ModuleDrift.loss_shift` of one batch, in units of the loss.

    Args:
        policies: Name and format of each column.
        measures: Names of the measures by key; one whose values are all unknown is left out.
        ranges: Least and largest coloured value by measure, as text; without those that have no positive value.
        rows: The modules, in order of the first measure.
    """

    policies: Sequence[tuple[str, str]]
    measures: Mapping[str, str]
    ranges: Mapping[str, tuple[str, str]]
    rows: Sequence[Row]

    @property
    def has_own_formats(self) -> bool:
        """Whether a module has or returns another format than that of the policy."""
        return any(cell.format for row in self.rows for cell in row.cells)

    @property
    def has_unknown(self) -> bool:
        """Whether a number is not known."""
        return any(value.look == "none" for row in self.rows for cell in row.cells for value in cell.values.values())


def heat_map(policies: Iterable[PolicyDrift], chosen: Mapping[str, str], batches: int) -> HeatMap | None:
    """Return the heat map of the policies with modules; None if there is none.

    Args:
        policies: The policies of a comparison.
        chosen: The chosen policy of each module, by its name; of modules that have none, nothing is marked.
        batches: The number of batches compared.
    """
    columns = [drift for drift in policies if drift.modules]
    if not columns:
        return None
    found = [{module.name: module for module in drift.modules} for drift in columns]
    names = list(dict.fromkeys(module.name for drift in columns for module in drift.modules))
    values = {
        key: [[_value(of[name], key, batches) if name in of else None for of in found] for name in names]
        for key in MEASURES
    }
    known = {key: grid for key, grid in values.items() if any(value is not None for row in grid for value in row)}
    largest = _LARGEST_OF_ONE if len(columns) == 1 else _LARGEST_RANGE
    scales = {key: _Scale.of((value for row in grid for value in row), largest) for key, grid in known.items()}
    ranks = {key: _ranks(grid) for key, grid in known.items()}
    rows = [
        Row(
            name=name or "(root)",
            type=next(of[name].type for of in found if name in of),
            ranks={key: of_key[row] for key, of_key in ranks.items()},
            cells=[
                Cell(
                    {key: scales[key].look_of(grid[row][column]) for key, grid in known.items()},
                    _own_format(of.get(name), _format(drift)),
                    _title(name or "(root)", drift.name, of.get(name), batches),
                    chosen.get(name) == drift.name,
                )
                for column, (drift, of) in enumerate(zip(columns, found, strict=True))
            ],
        )
        for row, name in enumerate(names)
    ]
    first = next(iter(known), None)
    rows.sort(key=lambda row: 0 if first is None else row.ranks[first])
    measures = {key: title for key, title in MEASURES.items() if key in known}
    ranges = {key: scale.ends for key, scale in scales.items() if scale.highest}
    return HeatMap([(drift.name, abbreviated(_format(drift))) for drift in columns], measures, ranges, rows)


def tiles(policies: Iterable[PolicyDrift], chosen: Mapping[str, str], batches: int, most: int) -> Iterator[Tiles]:
    """Yield the heat map of the errors that modules introduce as a picture of a notebook, if there are errors.

    Args:
        policies, chosen, batches: See `heat_map`.
        most: Largest number of rows.
    """
    heat = heat_map(policies, chosen, batches)
    if heat is None or "introduced" not in heat.measures:
        return
    rows = [(row.name, [_tile(cell) for cell in row.cells]) for row in heat.rows[:most]]
    more = f"; {several(len(heat.rows) - most, 'module')} with less are not shown" if len(heat.rows) > most else ""
    framed = "; the chosen format is framed" if chosen else ""
    yield Tiles(f"error that each module introduces{framed}{more}", [name for name, _ in heat.policies], rows)


def _tile(cell: Cell) -> Tile:
    value = cell.values["introduced"]
    shades = {"bad": None, "none": 0.0}
    shade = shades[value.look] if value.look in shades else int(value.look) / STEPS
    return Tile(value.text, shade, cell.format, cell.is_chosen)


def returns_other(module: ModuleDrift) -> str:
    """Return "returns " and the dtypes of the outputs, if none is the dtype that the policy gives; else ""."""
    is_dtype = module.computes_in in _SHORT
    is_other = is_dtype and module.returns and module.computes_in not in module.returns.split(", ")
    return f"returns {module.returns}" if is_other else ""


def shift_of_a_batch(module: ModuleDrift, batches: int) -> float | None:
    """Return the loss shift of one batch: squares are summed over the batches, as if their errors were independent."""
    return None if module.loss_shift is None else module.loss_shift / math.sqrt(batches)


def abbreviated(text: str) -> str:
    """Shorten names of dtypes in a text, as in "fp32"."""
    return re.sub(r"\w+", lambda word: _SHORT.get(word[0], word[0]), text)


@dataclass(frozen=True)
class _Scale:
    """A logarithmic scale of colours; both ends are 0 if there is nothing to colour.

    Args:
        lowest: Where the first colour begins.
        highest: Where the last colour ends.
        is_cut: Whether smaller values have the first colour too.
    """

    lowest: float
    highest: float
    is_cut: bool

    @classmethod
    def of(cls, values: Iterable[float | None], largest: float) -> _Scale:
        """Return the scale of some values, whose ends differ at most by a factor."""
        drawn = [value for value in values if value is not None and 0 < value < math.inf]
        if not drawn:
            return cls(0.0, 0.0, False)
        highest = max(drawn)
        lowest = min(max(min(drawn), highest / largest), highest / _LEAST_RANGE)
        return cls(lowest, highest, min(drawn) < lowest)

    @property
    def ends(self) -> tuple[str, str]:
        sign = "\N{LESS-THAN OR EQUAL TO} " if self.is_cut else ""
        return f"{sign}{self.lowest:.1e}", f"{self.highest:.1e}"

    def look_of(self, value: float | None) -> Value:
        """Return a value with its colour."""
        if value is None:
            return Value("\N{EN DASH}", "none")
        if not math.isfinite(value):
            return Value("inf", "bad")
        if value == 0 or not self.highest:
            return Value("0", "0")
        position = math.log(value / self.lowest) / math.log(self.highest / self.lowest)
        return Value(f"{value:.1e}", str(1 + min(max(int(position * STEPS), 0), STEPS - 1)))


def _value(module: ModuleDrift, key: str, batches: int) -> float | None:
    if key == "shift":
        value = shift_of_a_batch(module, batches)
    else:
        value = None if module.introduced is None else module.introduced.relative_rms
        if module.introduced is not None and module.introduced.nonfinite:
            return math.inf
    return value if value is None or not math.isnan(value) else None


def _ranks(grid: Sequence[Sequence[float | None]]) -> list[int]:
    """Return the position of each row, those with the largest value first; equal ones keep their order."""
    worst = [max((value for value in row if value is not None), default=-1.0) for row in grid]
    order = sorted(range(len(grid)), key=lambda row: -worst[row])
    places = {row: place for place, row in enumerate(order)}
    return [places[row] for row in range(len(grid))]


def _format(drift: PolicyDrift) -> str:
    return "" if drift.policy is None else drift.policy.compute


def _own_format(module: ModuleDrift | None, of_policy: str) -> str:
    if module is None or not of_policy:
        return ""
    returned = returns_other(module)
    if returned and returned != f"returns {of_policy}":
        return abbreviated(returned)
    return "" if module.computes_in == of_policy else abbreviated(module.computes_in)


def _title(name: str, policy: str, module: ModuleDrift | None, batches: int) -> str:
    """Return all that is known of a cell in words."""
    if module is None:
        return f"{name}, {policy}: not called"
    parts = [f"the policy gives it {module.computes_in}" if module.computes_in else ""]
    parts.append(f"it returns {module.returns}" if module.returns else "")
    for label, errors in (("introduces", module.introduced), ("carries", module.carried)):
        parts.append("" if errors is None else f"{label} a relative error of {errors.relative_rms:.3g}")
    shift = shift_of_a_batch(module, batches)
    parts.append("" if shift is None else f"shifts the loss by {shift:.3g}")
    return f"{name}, {policy}: {'; '.join(filter(None, [*parts, module.problem]))}"
