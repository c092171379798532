"""Read the samples of castwise 0.2, which packed them: JSON of one column per number, in an .xz stream in base 85.

The names of the rows are in the last `names` record before a sample. A sample with only some of them, such as that of a
skipped step, lists their indices.
"""

from __future__ import annotations

import base64
import json
import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from castwise.monitor._gzip_members import MOST_BYTES
from castwise.monitor._records import JsonObject

_MEMORY = 64 << 20  # for the decompressor, whose dictionary the stream asks for
_NAMED = "gradients", "activations", "weights"


@dataclass(frozen=True)
class _Names(JsonObject):
    gradients: tuple[str, ...] = ()
    owned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    activations: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()


class PackedSamples:
    """Unpacks the samples of one file, up to `MOST_BYTES` bytes for each, and as many in total as a file may hold.

    Args:
        size: Bytes of the file. In total, samples may unpack to the limit for one plus sixty-four times as many.
    """

    def __init__(self, size: int) -> None:
        self._most = self._left = MOST_BYTES + 64 * size
        self._names = _Names()
        self._owners: dict[str, list[tuple[int, str, int]]] = {}  # by name: modules, and positions in them

    def plain(self, record: Any) -> Any:
        """Return the JSON object of a packed sample with all of its numbers, None for names, others unchanged.

        Raises:
            ValueError: The sample or the names are not as castwise 0.2 wrote them, or too large.
        """
        if not isinstance(record, dict):
            return record
        if record.get("kind") == "names":
            self._names, self._owners = _names(record), {}
            for index, (module, own) in enumerate(self._names.owned.items()):
                for position, name in enumerate(own):
                    self._owners.setdefault(name, []).append((index, module, position))
            return None
        if record.get("kind") != "sample" or "packed" not in record:
            return record
        if not isinstance(record["packed"], str):
            raise ValueError("a sample: packed must be a string")
        try:
            columns = json.loads(self._decompressed(base64.b85decode(record["packed"])))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it cannot be unpacked: {error}") from None
        return {**{name: value for name, value in record.items() if name != "packed"}, **self._from(columns)}

    def _decompressed(self, content: bytes) -> bytes:
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

    def _from(self, columns: Any) -> dict[str, Any]:
        try:
            rows = dict(columns.get("rows", {}))
            names = {kind: _some(getattr(self._names, kind), rows.get(kind)) for kind in _NAMED}
            updates = zip(names["weights"], columns["weights"], strict=True)
            return {
                "gradients": _stats(names["gradients"], columns["gradients"]),
                "owned": self._owned(names["gradients"]),
                "activations": _stats(names["activations"], columns["activations"]),
                "weights": {name: {"update_to_weight": of, "lost_in_bf16": lost} for name, (of, lost) in updates},
                **({"quantized": columns["quantized"]} if "quantized" in columns else {}),
            }
        except (LookupError, AttributeError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"its columns are not those of a sample: {type(error).__name__}: {error}") from None

    def _owned(self, sampled: Iterable[str]) -> dict[str, list[str]]:
        """Return the sampled parameters that each module owns, in the order of modules, in time linear in them."""
        owned: dict[tuple[int, str], list[tuple[int, str]]] = {}
        for name in sampled:
            for index, module, position in self._owners.get(name, ()):
                owned.setdefault((index, module), []).append((position, name))
        return {module: [name for _, name in sorted(own)] for (_, module), own in sorted(owned.items())}


def _names(record: Mapping[str, Any]) -> _Names:
    try:
        return _Names.from_json(record)
    except ValueError as error:
        raise ValueError(f"a names: {error}") from None


def _some(names: Sequence[str], rows: Any) -> Sequence[str]:
    if rows is None:
        return names
    if any(type(row) is not int or row < 0 for row in rows):
        raise ValueError("a row is not an index")
    return [names[row] for row in rows]


def _stats(names: Sequence[str], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics of each name; `SampleRecord.from_json` checks them."""
    numbers = (columns[name] for name in ("numel", "zero", "nonfinite", "largest", "smallest", "lowest", "counts"))
    return {
        name: {
            "numel": numel,
            "largest": largest,
            "smallest": smallest,
            "zero": zero / max(numel, 1),
            "nonfinite": nonfinite / max(numel, 1),
            "exponents": {"lowest": lowest, "counts": counts},
        }
        for name, numel, zero, nonfinite, largest, smallest, lowest, counts in zip(names, *numbers, strict=True)
    }
