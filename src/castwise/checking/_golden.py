"""`Golden`: what a program computed when it was recorded, and the file that keeps it."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from castwise import _files
from castwise.checking._recorder import DECIDING, Kind, ProbeKey
from castwise.checking._sketches import KEPT, Sketch

FORMAT = 1
KEPT_OF_MODULES = 4
"""Buckets that a file keeps of inputs, outputs and gradients of modules."""
MOST_PROBES = 3000
"""Probes from which on a file has fewer of modules."""
_HEADER, _VALUES = "header.json", "values.bin"
_BYTES = 6  # of the eight of a float64, which leaves 36 bits of the fraction: 7e-12
_PARTS: dict[str, type] = {
    **dict.fromkeys(("format", "steps", "skipped"), int),
    **dict.fromkeys(("about", "local"), dict),
    **dict.fromkeys(("settings", "digests", "names", "probes", "left_out"), list),
    "dtype": str,
}
_DTYPES = ("float32", "bfloat16", "float16", "unknown")
_KINDS = get_args(Kind)
_LARGEST = 64 * 2**20  # of either part, unpacked: a file of another program must not fill the memory


@dataclass
class Golden:
    """What a program computed when it was recorded. Made by `record` and `Golden.load`.

    Args:
        steps: Optimizer steps that were recorded.
        dtype: The narrowest dtype in which the program computes: "float32", "bfloat16", "float16", or "unknown".
        about: Versions, device, threads and the git commit; `is_of_a_run` if a Monitor has recorded it, which can
            repeat nothing: then there are no errors, and sketches are those of the program's own dtypes.
        settings: Settings of the optimizers at each step.
        digests: Hashes of gradients, weights and buffers after each step, as computed in the program's dtypes.
        losses: Hashes of the losses before each step; none if a Monitor has recorded them.
        probes: Sketches of the run in float64, in the order of computing.
        callers: For inputs of a module, the module whose code called it; None if the program did.
        errors: For values that decide, the error of the program in its own dtypes, relative to float64.
        spreads: For the same values, the largest such error of the runs with random rounding.
        local: For each module, the largest error against float64 on its own inputs.
        left_out: Values that are rounding noise, and are therefore not compared.
        skipped: Steps that a gradient scaler skipped.
    """

    steps: int
    dtype: str
    about: dict[str, Any]
    settings: list[list[dict[str, Any]]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    probes: dict[ProbeKey, Sketch] = field(default_factory=dict)
    callers: dict[ProbeKey, str | None] = field(default_factory=dict)
    errors: dict[ProbeKey, float] = field(default_factory=dict)
    spreads: dict[ProbeKey, float] = field(default_factory=dict)
    local: dict[str, float] = field(default_factory=dict)
    left_out: set[ProbeKey] = field(default_factory=set)
    skipped: int = 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, atomically. The manual describes its format.

        Args:
            path: A new file, or a golden file to replace.

        Raises:
            FileExistsError: There is a file that is not a golden file.
            OSError: The file cannot be written.
        """
        buffer = io.BytesIO()
        probes = _thinned(self.probes)
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in ((_HEADER, self._header(probes)), (_VALUES, self._values(probes))):
                archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED, 9)
        _files.replace(Path(path), buffer.getvalue(), "a golden file", _is_golden)

    def _header(self, probes: list[ProbeKey]) -> bytes:
        names = sorted(
            {key.name for key in probes} | {caller for caller in self.callers.values() if caller is not None}
        )
        number = {name: i for i, name in enumerate(names)}
        rows = []
        for key in probes:
            caller = self.callers.get(key)
            row = [key.step, key.kind, number[key.name], key.call, key.position]
            rows.append(row + ([] if key.kind != "in" else [-1 if caller is None else number[caller]]))
        header = {
            "format": FORMAT,
            "steps": self.steps,
            "dtype": self.dtype,
            "about": self.about,
            "settings": self.settings,
            "digests": self.digests,
            "losses": self.losses,
            "skipped": self.skipped,
            "names": names,
            "probes": rows,
            "left_out": [i for i, key in enumerate(probes) if key in self.left_out],
            "local": {name: float(f"{error:.3g}") for name, error in self.local.items()},
        }
        return json.dumps(header, separators=(",", ":")).encode()

    def _values(self, probes: list[ProbeKey]) -> bytes:
        parts = []
        for key in probes:
            sketch = self.probes[key]
            kept = KEPT if key.kind in DECIDING else KEPT_OF_MODULES
            parts += [_packed(value) for value in (*sketch.folded(kept), sketch.norm, sketch.sum)]
        for key in probes:
            if key.kind in DECIDING:
                parts.append(struct.pack("<ff", self.errors.get(key, math.nan), self.spreads.get(key, math.nan)))
        return b"".join(parts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Golden:
        """Read a golden file. Reading runs no code of the file.

        Args:
            path: A file that `save` has written; it may be untrusted.

        Raises:
            ValueError: It is not a golden file, or one of a newer version of castwise.
            OSError: The file cannot be read.
        """
        try:
            with zipfile.ZipFile(path) as archive:
                header = json.loads(_read(archive, _HEADER))
                values = _read(archive, _VALUES)
            _check_parts(header)
            version = header["format"]
            golden = cls._of(header, values) if version <= FORMAT else None
        except OSError:
            raise
        except Exception as error:  # any that the parsers of an untrusted file may raise
            raise ValueError(
                f"{path} is not a golden file of `castwise check record`: {error}; give another file, or record again"
            ) from None
        if golden is None:
            raise ValueError(f"{path} has format {version}, which needs a newer version of castwise")
        return golden

    @classmethod
    def _of(cls, header: dict[str, Any], values: bytes) -> Golden:
        _check_header(header)
        golden = cls(header["steps"], header["dtype"], dict(header["about"]))
        golden.settings, golden.digests = [_settings(step) for step in header["settings"]], list(header["digests"])
        golden.losses, golden.skipped = list(header.get("losses", [])), header["skipped"]
        golden.local = {str(name): _positive(f"the error of {name}", error) for name, error in header["local"].items()}
        keys = golden._read_keys(header["names"], header["probes"])
        golden.left_out = {keys[_index(i, keys)] for i in header["left_out"]}
        at = 0
        for key in keys:
            count = (KEPT if key.kind in DECIDING else KEPT_OF_MODULES) + 2
            *buckets, norm, total = (_unpacked(values[at + i * _BYTES :][:_BYTES]) for i in range(count))
            golden.probes[key], at = Sketch(tuple(buckets), norm, total), at + count * _BYTES
        golden._check_values()
        for key in keys:
            if key.kind in DECIDING:
                error, spread = struct.unpack_from("<ff", values, at)
                at += 8
                if not (math.isnan(error) and math.isnan(spread)):
                    golden.errors[key] = _positive(f"the error of {key.kind} {key.name}", error, math.inf)
                    golden.spreads[key] = _positive(f"the spread of {key.kind} {key.name}", spread, math.inf)
        if at != len(values):
            raise ValueError(f"its values have {len(values)} bytes, and its probes need {at}")
        return golden

    def _read_keys(self, names: list[str], rows: list[list[Any]]) -> list[ProbeKey]:
        keys = []
        for step, kind, name, call, position, *caller in rows:
            if kind not in _KINDS:
                raise ValueError(f"a probe is of kind {kind!r}; known are {', '.join(_KINDS)}")
            numbers = [_count("a probe's number", number) for number in (step, call, position)]
            key = ProbeKey(numbers[0], kind, str(names[_index(name, names)]), *numbers[1:])
            keys.append(key)
            if kind == "in":
                self.callers[key] = None if caller[0] == -1 else str(names[_index(caller[0], names)])
        if len(set(keys)) < len(keys):
            raise ValueError("it has a probe twice")
        return keys

    def _check_values(self) -> None:
        """Raise a ValueError if a recording cannot have such a value."""
        for key, sketch in self.probes.items():
            is_finite = math.isfinite(sketch.norm)
            may_be_infinite = self.about.get("is_of_a_run") or key in self.left_out or key.kind not in DECIDING
            if sketch.norm < 0 or (is_finite and not all(map(math.isfinite, (*sketch.buckets, sketch.sum)))):
                raise ValueError(f"the value of {key.kind} {key.name} in step {key.step + 1} is damaged")
            if not is_finite and not may_be_infinite:
                raise ValueError(f"the value of {key.kind} {key.name} in step {key.step + 1} is {sketch.norm}")


def _check_parts(header: object) -> None:
    """Raise a ValueError if a part of a header is missing, or of another type."""
    if not isinstance(header, dict):
        raise ValueError(f"its header must be an object, got a {type(header).__name__}")
    if missing := [name for name in _PARTS if name not in header]:
        raise ValueError(f"its header has no {', '.join(missing)}")
    for name, kind in _PARTS.items():
        if not isinstance(header[name], kind):
            raise ValueError(f"{name} must be of type {kind.__name__}, got {header[name]!r:.80}")


def _check_header(header: dict[str, Any]) -> None:
    """Raise a ValueError if the parts of a header cannot be those of one recording."""
    steps = _count("steps", header["steps"])
    _count("skipped", header["skipped"])
    _count("ranks", header["about"].get("ranks", 1), 1)
    if header["dtype"] not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {header['dtype']!r}")
    for key, least in (("settings", steps), ("digests", max(steps, 1)), ("losses", steps)):
        found = header.get(key)
        if found is not None and (key != "losses" or found) and len(found) < least:
            raise ValueError(f"it has {key} of {len(found)} steps, and must have them of {least}")
    if not all(header["settings"]):
        raise ValueError("a step has no settings of an optimizer")
    if not all(isinstance(text, str) for key in ("digests", "losses") for text in header.get(key, ())):
        raise ValueError("digests and losses must be hashes")


def _count(name: str, value: object, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def _index(value: object, items: list[Any]) -> int:
    position = _count("a position", value)
    if position >= len(items):
        raise ValueError(f"a position must be less than {len(items)}, got {position}")
    return position


def _positive(name: str, value: object, most: float = sys.float_info.max) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{name} must be a number >= 0, got {value!r}")
    return float(value)


def _settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for group in groups:
        if not isinstance(group, dict) or not {"optimizer", "group", "values", "params"} <= group.keys():
            raise ValueError(f"settings must have optimizer, group, values and params, got {group!r:.80}")
    return [
        {
            "optimizer": str(group["optimizer"]),
            "group": int(group["group"]),
            "values": dict(group["values"]),
            "params": list(group["params"]),
        }
        for group in groups
    ]


def refuse_foreign(path: Path) -> None:
    """Raise a FileExistsError if there is a file that is not a golden file."""
    if path.is_file():
        _files.refuse_foreign(path, "a golden file", _is_golden)


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _LARGEST:
        raise ValueError(f"{name} is too large")
    return archive.read(name)


def _packed(value: float) -> bytes:
    (bits,) = struct.unpack(">Q", struct.pack(">d", value))
    return int(min(bits + 0x8000, 2**64 - 1)).to_bytes(8, "big")[:_BYTES]  # rounded to nearest


def _unpacked(value: bytes) -> float:
    (number,) = struct.unpack(">d", value + bytes(8 - _BYTES))
    return float(number)


def _is_golden(head: bytes) -> bool:
    return head.startswith(b"PK") and _HEADER.encode() in head


def _thinned(probes: Iterable[ProbeKey]) -> list[ProbeKey]:
    """Leave out probes of modules while there are too many: those of middle steps, then inputs, then later steps."""
    keys = list(probes)
    last = max((key.step for key in keys), default=0)
    rules = (
        lambda key: key.step in (0, last),
        lambda key: key.kind != "in",
        lambda key: key.step == 0,
    )
    for keeps in rules:
        if len(keys) > MOST_PROBES:
            keys = [key for key in keys if key.kind in DECIDING or keeps(key)]
    return keys
