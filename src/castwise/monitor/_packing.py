"""Pack records for a file, to a twenty-fifth of their size: compress samples, and omit default values of steps.

A packed sample is one JSON object, compressed with LZMA (an .xz stream) and encoded in base 85. It has columns instead
of one object per tensor; the names are in the last `names` record before it. A sample with only some of these names,
such as that of a skipped step, lists their indices. Derived numbers are recomputed on reading: statistics of modules,
which are sums over their parameters, and the fit into formats.
"""

from __future__ import annotations

import base64
import json
import lzma
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from castwise.monitor._curves import added_up
from castwise.monitor._formats import LOW_PRECISION, Format
from castwise.monitor._record_shape import QUANTIZED

Record = dict[str, Any]

_USUAL: Record = {
    "scale": None,
    "skipped": False,
    "cause": None,
    "rank": None,
    "parameters": [],
    "grad_norm": None,
    "loss": None,
    "seconds": None,
}
_NAMED = "gradients", "activations", "weights"
_DIGITS = {"grad_norm": 7, "loss": 7, "seconds": 4}
_COUNT_DIGITS, _NUMBER_DIGITS = 3, 4
# With the default dictionary size of 8 MiB the compressor would need 90 MiB of memory.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 18}]
MOST_BYTES = 64 << 20
"""Limit for the bytes of a record, as it is in the file and unpacked, because a file may be untrusted."""
_MEMORY = 64 << 20  # for the decompressor, whose dictionary the stream asks for
_LOWEST, _HIGHEST = -1074, 1023


def shortened(step: Mapping[str, Any]) -> Record:
    """Return a step's record without default values, and with rounded numbers."""
    return {
        name: _rounded(value, _DIGITS[name]) if name in _DIGITS else value
        for name, value in step.items()
        if name not in _USUAL or value != _USUAL[name]
    }


def in_full(step: Record) -> Record:
    """Return a step's record with default values filled in; records of older versions may lack them too."""
    usual = {**_USUAL, "parameters": []}  # a new list
    return {**step, **{name: value for name, value in usual.items() if name not in step}}


NO_NAMES: Record = {"kind": "names", "gradients": [], "owned": {}, "activations": [], "weights": []}


def names_with(sample: Mapping[str, Any], known: Mapping[str, Any]) -> Record:
    """Return a `names` record with the known names and those of a sample; equal to `known` if none is new."""
    owned, more = known["owned"], sample["owned"]
    return {
        "kind": "names",
        "gradients": _joined(known["gradients"], sample["gradients"]),
        "owned": {module: _joined(owned.get(module, ()), more.get(module, ())) for module in _joined(owned, more)},
        "activations": _joined(known["activations"], sample["activations"]),
        "weights": _joined(known["weights"], sample["weights"]),
    }


def _joined(known: Collection[str], more: Collection[str]) -> list[str]:
    """Return the names in either, in the order of the longer one, which is more likely that of the model."""
    return list(dict.fromkeys([*more, *known] if len(more) > len(known) else [*known, *more]))


def can_be_packed(sample: Mapping[str, Any]) -> bool:
    """Return True if a sample has the fields to derive modules and formats; the scale must be a power of two."""
    return "owned" in sample and math.frexp(sample["scale"])[0] == 0.5


def pack(sample: Mapping[str, Any], names: Mapping[str, Any]) -> Record:
    """Return the packed record of a sample, for a file in which `names` is the last `names` record."""
    rows = {kind: _places(sample[kind], names[kind]) for kind in _NAMED if list(sample[kind]) != names[kind]}
    columns = {
        **({"rows": rows} if rows else {}),
        "gradients": _columns(sample["gradients"].values()),
        "activations": _columns(sample["activations"].values()),
        "weights": [
            [_spelled(each["update_to_weight"]), _spelled(each["lost_in_bf16"])] for each in sample["weights"].values()
        ],
        **({"quantized": _spelled_in(sample["quantized"])} if "quantized" in sample else {}),
    }
    content = json.dumps(columns, separators=(",", ":"), allow_nan=False).encode()
    norm = sample.get("grad_norm")
    return {
        "kind": "sample",
        "step": sample["step"],
        "scale": sample["scale"],
        **({} if norm is None else {"grad_norm": _rounded(norm, _DIGITS["grad_norm"])}),
        "packed": base64.b85encode(lzma.compress(content, filters=_FILTERS)).decode(),
    }


def _spelled_in(value: Any) -> Any:
    """Return the statistics of quantized layers with numbers rounded, and inf and NaN as strings."""
    if isinstance(value, Mapping):
        return {name: _spelled_in(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_spelled_in(each) for each in value]
    return _spelled(value) if isinstance(value, float) else value


def _places(some: Iterable[str], names: Sequence[str]) -> list[int]:
    place = {name: row for row, name in enumerate(names)}
    return [place[name] for name in some]


def _columns(stats: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        name: [] for name in ("numel", "zero", "nonfinite", "largest", "smallest", "lowest", "counts")
    }
    for each in stats:
        numel, exponents = each["numel"], each["exponents"]
        columns["numel"].append(numel)
        columns["zero"].append(round(each["zero"] * numel))
        columns["nonfinite"].append(round(each["nonfinite"] * numel))
        columns["largest"].append(_rounded(each["largest"], _NUMBER_DIGITS))
        columns["smallest"].append(None if each["smallest"] is None else _rounded(each["smallest"], _NUMBER_DIGITS))
        columns["lowest"].append(exponents["lowest"])
        columns["counts"].append([int(_rounded(n, _COUNT_DIGITS)) for n in exponents["counts"]])
    return columns


def _rounded(value: Any, digits: int) -> Any:
    return float(f"{value:.{digits}g}") if isinstance(value, (int, float)) else value


def _spelled(value: float) -> float | str:
    rounded: float = _rounded(value, _NUMBER_DIGITS)
    return rounded if math.isfinite(rounded) else str(rounded)


class Names:
    """The names that samples refer to, from a `names` record.

    Args:
        record: The record.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.lists: dict[str, list[str]] = {kind: record[kind] for kind in _NAMED}
        self._owners: dict[str, list[tuple[int, str, int]]] = {}  # by name: modules, and positions in them
        for place, (module, own) in enumerate(record["owned"].items()):
            for position, name in enumerate(own):
                self._owners.setdefault(name, []).append((place, module, position))

    def owned(self, sampled: Iterable[str]) -> dict[str, list[str]]:
        """Return the sampled parameters that each module owns, in the order of modules, in time linear in them."""
        owned: dict[tuple[int, str], list[tuple[int, str]]] = {}
        for name in sampled:
            for place, module, position in self._owners.get(name, ()):
                owned.setdefault((place, module), []).append((position, name))
        return {module: [name for _, name in sorted(own)] for (_, module), own in sorted(owned.items())}


class Unpacker:
    """Unpacks samples of one file, up to `MOST_BYTES` bytes for each, and as many in total as a file may hold.

    Args:
        size: Bytes of the file. In total, samples may unpack to the limit for one plus sixty-four times as many.
    """

    def __init__(self, size: int) -> None:
        self._most = self._left = MOST_BYTES + 64 * size

    def decompressed(self, content: bytes) -> bytes:
        """Return the content of an .xz stream.

        Raises:
            ValueError: It is truncated, damaged or too large.
        """
        most = min(MOST_BYTES, self._left)
        try:
            decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY)
            unpacked = decompressor.decompress(content, most)
        except (lzma.LZMAError, EOFError) as error:
            raise ValueError(str(error)) from None
        self._left -= len(unpacked)
        if not decompressor.eof:
            if len(unpacked) < most:
                raise ValueError("it is truncated")
            if most < MOST_BYTES:
                raise ValueError(f"the samples have more than {self._most:,} bytes, the limit for a file of this size")
            raise ValueError(f"it has more than {most:,} bytes, the limit for a record")
        return unpacked

    def unpack(self, sample: Mapping[str, Any], names: Names) -> Record:
        """Return the record of a packed sample, with counts rounded to three digits.

        Raises:
            ValueError: The sample was not packed by `pack` with these names, or is too large.
        """
        try:
            columns = json.loads(self.decompressed(base64.b85decode(sample["packed"])))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it cannot be unpacked: {error}") from None
        return _sample(sample, columns, names)


def _sample(sample: Mapping[str, Any], columns: Any, names: Names) -> Record:
    scale = float(sample["scale"])
    try:
        rows = dict(columns.get("rows", {}))
        named = {kind: _at(rows[kind], all_) if kind in rows else all_ for kind, all_ in names.lists.items()}
        gradients = _Table(named["gradients"], columns["gradients"])
        activations = _Table(named["activations"], columns["activations"])
        weights = [[float(number) for number in pair] for pair in columns["weights"]]
        if len(weights) != len(named["weights"]):
            raise ValueError(f"it has {len(weights)} weights instead of {len(named['weights'])}")
        owned = names.owned(gradients.names)
        return {
            "kind": "sample",
            "step": sample["step"],
            "scale": sample["scale"],
            "grad_norm": sample.get("grad_norm"),
            "gradients": gradients.records(scale),
            "modules": gradients.added_up(owned).records(scale),
            "owned": owned,
            "activations": activations.records(1.0),
            "weights": {
                name: {"update_to_weight": update, "lost_in_bf16": lost}
                for name, (update, lost) in zip(named["weights"], weights, strict=True)
            },
            **({"quantized": QUANTIZED(columns["quantized"])} if "quantized" in columns else {}),
        }
    except (LookupError, AttributeError, TypeError, OverflowError) as error:
        raise ValueError(f"its columns are not those of a sample: {type(error).__name__}: {error}") from None


def _at(places: Any, names: Sequence[str]) -> list[str]:
    return [names[place] for place in _whole(places, None, 0)]


class _Table:
    """Statistics of some tensors, one row each.

    Args:
        names: Names of the tensors.
        columns: Columns as from `_columns`.

    Raises:
        ValueError: The columns are invalid.
    """

    def __init__(self, names: Sequence[str], columns: Mapping[str, Any]) -> None:
        self.names, rows = list(names), len(names)
        self.numel, self.zero, self.nonfinite = (
            _whole(columns[name], rows, 0) for name in ("numel", "zero", "nonfinite")
        )
        self.lowest = _whole(columns["lowest"], rows, _LOWEST)
        self.counts = [_whole(counts, None, 0) for counts in columns["counts"]]
        self.largest: list[float] = list(columns["largest"])
        self.smallest: list[float | None] = list(columns["smallest"])
        if not len(self.counts) == len(self.largest) == len(self.smallest) == rows:
            raise ValueError(f"its columns do not have {rows} rows")
        if any(low + len(counts) > _HIGHEST + 1 for low, counts in zip(self.lowest, self.counts, strict=True)):
            raise ValueError(f"an exponent is above {_HIGHEST}")
        if not all(math.isfinite(number) and number >= 0.0 for number in [*self.largest, *filter(None, self.smallest)]):
            raise ValueError("a magnitude is not a finite number >= 0")

    def added_up(self, owned: Mapping[str, list[str]]) -> _Table:
        """Return a table with the sums of the rows that each module owns."""
        place, total = {name: row for row, name in enumerate(self.names)}, object.__new__(_Table)
        rows = [[place[name] for name in own] for own in owned.values()]
        total.names = list(owned)
        total.numel, total.zero, total.nonfinite = (
            [sum(column[row] for row in own) for own in rows] for column in (self.numel, self.zero, self.nonfinite)
        )
        total.largest = [max((self.largest[row] for row in own), default=0.0) for own in rows]
        total.smallest = [
            min((least for row in own if (least := self.smallest[row]) is not None), default=None) for own in rows
        ]
        total.lowest, total.counts = [], []
        for own in rows:
            lowest, counts = added_up((self.lowest[row], self.counts[row]) for row in own)
            total.lowest.append(lowest)
            total.counts.append(counts)
        return total

    def records(self, scale: float) -> dict[str, Record]:
        """Return the record of each tensor, with the fit of its values times `scale`, a power of two, into formats."""
        shift = round(math.log2(scale))
        # For each row, the number of elements below each exponent. The limits of formats are powers of two.
        below = [list(accumulate(counts, initial=0)) for counts in self.counts]
        elements = [max(numel, 1) for numel in self.numel]
        logs = [_log2(each) + shift for each in self.largest]
        of_formats = []
        for number_format in LOW_PRECISION.values():
            lost, normal = (
                [
                    (0 if cut <= low else sums[cut - low] if cut - low < len(sums) else sums[-1]) / numel
                    for sums, low, numel in zip(below, self.lowest, elements, strict=True)
                ]
                for cut in _cuts(number_format, shift)
            )
            subnormal = [whole - flush for whole, flush in zip(normal, lost, strict=True)]
            top = math.log2(number_format.largest)
            headroom = [-math.inf if bad else top - log for log, bad in zip(logs, self.nonfinite, strict=True)]
            of_formats.append(zip(lost, subnormal, headroom, strict=True))
        return {
            name: {
                "numel": numel,
                "largest": largest,
                "smallest": smallest,
                "zero": zero / max(numel, 1),
                "nonfinite": nonfinite / max(numel, 1),
                "exponents": {"lowest": low, "counts": counts},
                "formats": {
                    format_name: {"flush": flush, "subnormal": subnormal, "headroom_bits": headroom}
                    for format_name, (flush, subnormal, headroom) in zip(LOW_PRECISION, fits, strict=True)
                },
            }
            for name, numel, largest, smallest, zero, nonfinite, low, counts, fits in zip(
                self.names,
                self.numel,
                self.largest,
                self.smallest,
                self.zero,
                self.nonfinite,
                self.lowest,
                self.counts,
                zip(*of_formats, strict=True),
                strict=True,
            )
        }


def _whole(numbers: Any, length: int | None, lowest: int) -> list[int]:
    """Return a list of integers unchanged; raise a ValueError for anything else."""
    if not isinstance(numbers, list) or not set(map(type, numbers)) <= {int}:
        raise ValueError("a column is not a list of integers")
    if length is not None and len(numbers) != length:
        raise ValueError(f"a column has {len(numbers)} rows instead of {length}")
    if numbers and not lowest <= min(numbers) <= max(numbers) < 2**53:
        raise ValueError(f"a number is not in [{lowest}, 2**53)")
    return numbers


def _cuts(number_format: Format, shift: int) -> tuple[int, int]:
    """Return the exponents below which numbers times 2^shift flush to zero, and become subnormal, in a format."""
    return (
        number_format.smallest_subnormal_exponent - 1 - shift,
        number_format.smallest_normal_exponent - shift,
    )


def _log2(number: float) -> float:
    return math.log2(number) if number else -math.inf
