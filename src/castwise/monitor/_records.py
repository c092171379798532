"""The records of a run: frozen classes with the fields that the manual's page on formats lists.

`from_json` checks each field by its annotation, so that other code can rely on it. A `ValueError` names the field. Keys
without a field, such as those of a later castwise, are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from itertools import accumulate
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import Self

from castwise.monitor import _causes as causes
from castwise.monitor._formats import LOW_PRECISION

if TYPE_CHECKING:
    from castwise._mistakes.mistake import Mistake
    from castwise.diagnosis._diagnosis import Diagnosis

_Reader: TypeAlias = Callable[[Any], Any]

FORMAT = 3
"""The version of the format of files; higher ones are refused."""
LEFT_OUT = "left out by the script"
"""The cause in diagnoses of a step that a script without a scaler did not take, after a loss with an inf or NaN."""
LAST_SECOND = 2**34  # in the year 2514: every system can format times before it
_NOT_FINITE = {"nan", "inf", "-inf"}
# Exponents of fp64's smallest and largest numbers.
_LOWEST, _HIGHEST = -1074, 1023
# Significant digits in a file.
_DIGITS, _COUNT_DIGITS = 4, 3
_STEP_DIGITS = ("grad_norm", 7), ("loss", 7), ("seconds", _DIGITS), ("lr", 7)


# -- values -------------------------------------------------------------------------------------------------------


def _fail(wanted: str, got: object) -> ValueError:
    text = repr(got)
    return ValueError(f"must be {wanted}, got {text if len(text) <= 60 else f'{text[:60]}...'}")


def _number(value: Any) -> float:
    """Read a number. Strings stand for inf and NaN, which JSON lacks."""
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or (isinstance(value, int) and abs(value) >= 2**63)
    ):
        raise _fail("a number, or 'nan', 'inf' or '-inf'", value)
    return value


def _time(value: Any) -> float:
    """Read a time; one before 1970, of a clock that was never set, becomes 0, which every system can format."""
    number = _number(value)
    if not -LAST_SECOND < number < LAST_SECOND:
        raise _fail(f"seconds since 1970, less than {LAST_SECOND}", value)
    return max(0.0, number)


def _positive(value: Any) -> float:
    number = _number(value)
    if not 0.0 < number < math.inf:
        raise _fail("a finite number > 0", value)
    return number


def _integer(lowest: int, below: int = 2**63) -> _Reader:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value < below:
            raise _fail(f"an integer >= {lowest}" if below == 2**63 else f"an integer in [{lowest}, {below})", value)
        return value

    return read


def _instance(kind: type, wanted: str) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise _fail(wanted, value)
        return value

    return read


def _tuple(read: _Reader) -> _Reader:
    def read_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _fail("a list", value)
        return tuple(_at(index, read, item) for index, item in enumerate(value))

    return read_all


def _by_name(read: _Reader) -> _Reader:
    def read_all(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _fail("an object", value)
        try:
            return {name: read(item) for name, item in value.items()}
        except ValueError:
            return {name: _at(name, read, item) for name, item in value.items()}  # adds the name to the error

    return read_all


def _at(where: object, read: _Reader, value: Any) -> Any:
    try:
        return read(value)
    except ValueError as error:
        separator = " " if str(error).startswith(("must be", "lacks")) else ": "
        raise ValueError(f"{str(where)[:60]}{separator}{error}") from None


_PLAIN: Mapping[Any, _Reader] = {
    Any: lambda value: value,
    int: _integer(0),
    float: _number,
    bool: _instance(bool, "true or false"),
    str: _instance(str, "a string"),
}


def _reader(hint: Any) -> _Reader:
    """Return what reads a value of an annotation; `Annotated` may name another function for it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return arguments[1]  # type: ignore[no-any-return]
    if origin in (Union, UnionType):
        (inner,) = (argument for argument in arguments if argument is not NoneType)
        read = _reader(inner)
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _tuple(_reader(arguments[0]))
    if origin is Mapping:
        return _by_name(_reader(arguments[1]))
    return _PLAIN.get(hint) or hint.from_json


@cache
def _readers(kind: Any) -> tuple[Mapping[str, _Reader], Sequence[str]]:
    """Return what reads each field of a class, and the fields that must be there."""
    hints = get_type_hints(kind, include_extras=True)
    own = fields(kind)
    required = [one.name for one in own if one.default is MISSING and one.default_factory is MISSING]
    return {one.name: _reader(hints[one.name]) for one in own}, required


@cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return the names of a class's fields with their default values."""
    return tuple((one.name, one.default) for one in fields(kind))


def _plain(value: Any) -> Any:
    if isinstance(value, JsonObject):
        return value.to_json()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _rounded(value: Any, digits: int = _DIGITS) -> Any:
    """Return a value in which numbers have so many digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(item, digits) for name, item in value.items()}
    return [_rounded(item, digits) for item in value] if isinstance(value, (list, tuple)) else value


# -- classes ------------------------------------------------------------------------------------------------------


class JsonObject:
    """A JSON object with a class: a frozen dataclass, of which the annotations say what is read."""

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read a JSON object.

        Raises:
            ValueError: A field is missing or invalid.
        """
        if not isinstance(value, Mapping):
            raise _fail("an object", value)
        readers, required = _readers(cls)  # type: ignore[arg-type]  # a class is hashable
        missing = [name for name in required if name not in value]
        if missing:
            raise ValueError(f"lacks {' and '.join(missing)}")
        return cls(**{name: _at(name, read, value[name]) for name, read in readers.items() if name in value})

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of all fields. Numbers that JSON cannot represent stay as they are."""
        assert is_dataclass(self)
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}


class Record(JsonObject):
    """A record of a run."""

    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of all fields and the kind."""
        return {"kind": self.kind, **JsonObject.to_json(self)}

    def in_file(self) -> dict[str, Any]:
        """Return the JSON object for a file: without fields that have their default value."""
        assert is_dataclass(self)
        usual = {one.name: one.default for one in fields(self)}
        return {name: value for name, value in self.to_json().items() if value != usual.get(name, MISSING)}


@dataclass(frozen=True)
class RunRecord(Record):
    """The first record of a run."""

    kind = "run"
    format: Annotated[int, _integer(1)]
    settings: Mapping[str, Any]
    time: Annotated[float, _time] | None = None
    castwise: str | None = None
    torch: str | None = None
    device: str | None = None

    @property
    def versions(self) -> dict[str, str]:
        """What the run was made with: the known ones of castwise, torch and the device."""
        known = {name: getattr(self, name) for name in ("castwise", "torch", "device")}
        return {name: value for name, value in known.items() if value is not None}


def _names_or_none(value: Any) -> tuple[str, ...]:
    return () if value is None else tuple(_tuple(_PLAIN[str])(value))


@dataclass(frozen=True)
class StepRecord(Record):
    """One step of an optimizer."""

    kind = "step"
    step: int
    scale: float | None = None
    skipped: bool = False
    cause: str | None = None
    rank: int | None = None
    parameters: Annotated[tuple[str, ...], _names_or_none] = ()
    grad_norm: float | None = None
    loss: float | None = None
    seconds: float | None = None
    lr: float | None = None

    def in_file(self) -> dict[str, Any]:
        """Return the JSON object for a file, with rounded numbers."""
        found: dict[str, Any] = {"kind": self.kind}
        for name, usual in _defaults(StepRecord):  # in one pass, because it is written at each step
            value = getattr(self, name)
            if value != usual:
                found[name] = value
        for name, digits in _STEP_DIGITS:
            if isinstance(value := found.get(name), float):
                found[name] = float(f"{value:.{digits}g}")
        if self.parameters:
            found["parameters"] = list(self.parameters)
        return found

    @property
    def why_skipped(self) -> str:
        """The cause of a skip, which may be unknown."""
        return self.cause or causes.UNKNOWN

    @property
    def skip_in_words(self) -> str:
        """The cause of a skip, and the named parameters."""
        return f"{self.cause} {' '.join(self.parameters)}"

    @property
    def has_fault(self) -> bool:
        """Whether the step was skipped, or taken with an inf or NaN."""
        return self.skipped or self.cause is not None

    @property
    def has_bad_loss(self) -> bool:
        """Whether the loss is known to be inf or NaN."""
        return self.loss is not None and not math.isfinite(self.loss)


@dataclass(frozen=True)
class FormatFit(JsonObject):
    """How elements v fit into a format.

    Args:
        flush: The share of all elements with 0 < abs(v) < s / 2, where s is the smallest subnormal. They round to zero
            (and so does s / 2 itself, which counts as subnormal here).
        subnormal: The share with s / 2 <= abs(v) < the smallest normal number. They lose precision.
        headroom_bits: log2(largest number of the format / largest abs(v)). Negative if the largest element overflows,
            -inf if any element is inf or NaN, inf if all are zero.
    """

    flush: float
    subnormal: float
    headroom_bits: float


def _counts(value: Any) -> Sequence[int]:
    """Read a list of integers >= 0. A large run has tens of thousands of such lists."""
    if type(value) is list and set(map(type, value)) <= {int} and min(value, default=0) >= 0:
        return value
    return cast(Sequence[int], _tuple(_PLAIN[int])(value))


@dataclass(frozen=True)
class Exponents(JsonObject):
    """A histogram: `counts[i]` elements v have 2^e <= abs(v) < 2^(e + 1), where e = `lowest` + i."""

    lowest: Annotated[int, _integer(_LOWEST, _HIGHEST + 1)]
    counts: Annotated[Sequence[int], _counts]

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read a JSON object.

        Raises:
            ValueError: A field is missing or invalid.
        """
        read = super().from_json(value)
        if read.lowest + len(read.counts) > _HIGHEST + 1:
            raise _fail(f"at most {_HIGHEST}", read.lowest + len(read.counts) - 1)
        return read

    def items(self) -> Iterator[tuple[int, int]]:
        """Yield the exponents and counts that are not zero."""
        return ((exponent, count) for exponent, count in enumerate(self.counts, self.lowest) if count)

    def below(self, exponent: int) -> int:
        """Return the number of elements v with 0 < abs(v) < 2^exponent."""
        return sum(self.counts[: max(exponent - self.lowest, 0)])

    @classmethod
    def total(cls, several: Iterable[Exponents]) -> Exponents:
        """Return the sum of histograms."""
        some = [one for one in several if one.counts]
        lowest = min((one.lowest for one in some), default=0)
        counts = [0] * (max((one.lowest + len(one.counts) for one in some), default=0) - lowest)
        for one in some:
            for index, count in enumerate(one.counts, one.lowest - lowest):
                counts[index] += count
        return cls(lowest, counts)


def _formats(value: Any) -> Mapping[str, FormatFit]:
    fits: Mapping[str, FormatFit] = _by_name(FormatFit.from_json)(value)
    if missing := [name for name in LOW_PRECISION if name not in fits]:
        raise ValueError(f"lacks {' and '.join(missing)}")
    return fits


# For each format: the exponents below which numbers round to zero, and are subnormal, and log2 of its largest number.
_LIMITS = {
    name: (one.smallest_subnormal_exponent - 1, one.smallest_normal_exponent, math.log2(one.largest))
    for name, one in LOW_PRECISION.items()
}


def nearest_exponent(scale: float) -> int:
    """Return the exponent of the power of two nearest to a scale."""
    return round(math.log2(scale))


@dataclass(frozen=True)
class Stats(JsonObject):
    """Statistics of the magnitudes of a tensor's elements.

    Args:
        numel: Number of elements.
        largest, smallest: The largest finite magnitude, or 0; the smallest non-zero magnitude, or None.
        zero, nonfinite: Shares of all elements.
        exponents: The elements by exponent.
        formats: The fit of all elements, while they are scaled, by the name of the format.
    """

    numel: int
    largest: float
    smallest: float | None
    zero: float
    nonfinite: float
    exponents: Exponents
    formats: Annotated[Mapping[str, FormatFit], _formats] = field(default_factory=dict)

    def in_file(self, *, has_formats: bool = True) -> dict[str, Any]:
        """Return the JSON object for a file, with rounded numbers; without the formats if they follow from it."""
        counts = [
            count if count < 1000 else int(_rounded(float(count), _COUNT_DIGITS)) for count in self.exponents.counts
        ]
        return {
            "numel": self.numel,
            "largest": _rounded(self.largest),
            "smallest": _rounded(self.smallest),
            "zero": _rounded(self.zero, 7),
            "nonfinite": _rounded(self.nonfinite, 7),
            "exponents": {"lowest": self.exponents.lowest, "counts": counts},
            **({"formats": _rounded(_plain(self.formats))} if has_formats else {}),
        }

    def fits(self, shift: int = 0) -> dict[str, FormatFit]:
        """Return the fit of the elements times 2^shift into each format."""
        lowest, numel, bins = self.exponents.lowest + shift, max(self.numel, 1), len(self.exponents.counts)
        below = list(accumulate(self.exponents.counts, initial=0))  # the number of elements below each exponent
        # Not the logarithm of a quotient, which may overflow.
        log = math.log2(self.largest) + shift if self.largest else -math.inf
        fits = {}
        for name, (subnormal, normal, top) in _LIMITS.items():
            lost = 0.0 if subnormal <= lowest else below[min(subnormal - lowest, bins)] / numel
            coarse = 0.0 if normal <= lowest else below[min(normal - lowest, bins)] / numel
            fits[name] = FormatFit(lost, coarse - lost, -math.inf if self.nonfinite else top - log)
        return fits

    def fitted(self, scale: float) -> Stats:
        """Return a copy with the fit of the elements times `scale`, by the nearest power of two, into formats.

        Raises:
            ValueError: A number is none that a tensor can have.
        """
        if not 0.0 <= self.largest < math.inf:
            raise ValueError(f"largest {_fail('a finite number >= 0', self.largest)}")
        shares = []
        for name, share in (("zero", self.zero), ("nonfinite", self.nonfinite)):
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{name} {_fail('a number in [0, 1]', share)}")
            shares.append(round(share * self.numel) / max(self.numel, 1))  # files have seven digits
        zero, nonfinite = shares
        formats = self.fits(nearest_exponent(scale))
        return Stats(self.numel, self.largest, self.smallest, zero, nonfinite, self.exponents, formats)

    @classmethod
    def total(cls, parts: Sequence[Stats]) -> Stats:
        """Return the statistics of several tensors together, without formats."""
        numel = sum(part.numel for part in parts)
        zero, nonfinite = (
            sum(round(share * part.numel) for share, part in zip(shares, parts, strict=True)) / max(numel, 1)
            for shares in ([part.zero for part in parts], [part.nonfinite for part in parts])
        )
        smallest = min((part.smallest for part in parts if part.smallest is not None), default=None)
        largest = max(part.largest for part in parts)
        return cls(numel, largest, smallest, zero, nonfinite, Exponents.total(part.exponents for part in parts))


@dataclass(frozen=True)
class Update(JsonObject):
    """How far a step moved a parameter; see `_updates.update_of`."""

    update_to_weight: float
    lost_in_bf16: float


@dataclass(frozen=True)
class Operand(JsonObject):
    """The quantization error of one operand of a layer with a recipe; see `QuantizedSample.layers`."""

    saturated: float
    flushed: float
    relative_error: float
    scale: tuple[float, ...]


@dataclass(frozen=True)
class QuantizedLayer(JsonObject):
    """The operands of a layer with a recipe that were measured."""

    recipe: str
    input: Operand | None = None
    weight: Operand | None = None
    grad_output: Operand | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, without the operands that were not measured."""
        return {name: value for name, value in JsonObject.to_json(self).items() if value is not None}


@dataclass(frozen=True)
class SampleRecord(Record):
    """Statistics of a sampled step; see `_sample.sample_record`."""

    kind = "sample"
    step: int
    scale: Annotated[float, _positive]
    grad_norm: float | None = None
    gradients: Mapping[str, Stats] = field(default_factory=dict)
    modules: Mapping[str, Stats] = field(default_factory=dict)
    owned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    activations: Mapping[str, Stats] = field(default_factory=dict)
    weights: Mapping[str, Update] = field(default_factory=dict)
    quantized: Mapping[str, QuantizedLayer] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read a JSON object, and compute what a file leaves out: modules, and the fit into formats.

        Raises:
            ValueError: A field is missing or invalid.
        """
        sample = super().from_json(value)
        gradients = _fitted("gradients", sample.gradients, sample.scale)
        modules: Mapping[str, Stats] = sample.modules
        if not modules:
            missing = [name for own in sample.owned.values() for name in own if name not in gradients]
            if missing:
                raise ValueError(f"owned: there are no gradients of {missing[0][:60]}")
            owned = {module: own for module, own in sample.owned.items() if own}
            modules = {module: Stats.total([gradients[name] for name in own]) for module, own in owned.items()}
        modules = _fitted("modules", modules, sample.scale)
        activations = _fitted("activations", sample.activations, 1.0)
        return replace(sample, gradients=gradients, modules=modules, activations=activations)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, with quantized layers and dtypes if there are any."""
        record = Record.to_json(self)
        return {name: value for name, value in record.items() if name not in ("quantized", "dtypes") or value}

    def in_file(self) -> dict[str, Any]:
        """Return the JSON object for a file, with rounded numbers.

        Statistics of modules are sums over their parameters, and formats follow from the exponents and the scale, so
        both are left out. If the scale is not a power of two, exponents are not exact, and they are kept.
        """
        is_exact = bool(self.owned) and math.frexp(self.scale)[0] == 0.5
        written = ("gradients", "activations") if is_exact else ("gradients", "modules", "activations")
        stats = {
            name: {key: one.in_file(has_formats=not is_exact) for key, one in getattr(self, name).items()}
            for name in written
        }
        return {
            "kind": self.kind,
            "step": self.step,
            "scale": self.scale,
            **({} if self.grad_norm is None else {"grad_norm": _rounded(self.grad_norm, 7)}),
            "owned": _plain(self.owned),
            **stats,
            "weights": _rounded(_plain(self.weights)),
            **({"quantized": _rounded(_plain(self.quantized))} if self.quantized else {}),
            **({"dtypes": _plain(self.dtypes)} if self.dtypes else {}),
        }


def _fitted(where: str, given: Mapping[str, Stats], scale: float) -> Mapping[str, Stats]:
    read = _by_name(lambda stats: stats if stats.formats else stats.fitted(scale))
    return cast(Mapping[str, Stats], _at(where, read, given))


@dataclass(frozen=True)
class DiagnosisRecord(Record):
    """What the replay of a step with an inf or NaN found."""

    kind = "diagnosis"
    step: int
    cause: str
    phase: str
    module: str
    op: str
    text: str
    advice: str
    rank: int | None = None
    summary: str = ""
    remedy: str | None = None
    code: str = ""
    tried: str = ""
    sample: str = ""

    @property
    def with_advice(self) -> str:
        """The text and the advice, for a dashboard."""
        return f"{self.text}\n\n{self.advice}"

    @classmethod
    def of(cls, step: int, cause: str, diagnosis: Diagnosis) -> DiagnosisRecord:
        """Return the record of a diagnosis."""
        texts = diagnosis.phase, diagnosis.module, diagnosis.op, str(diagnosis), diagnosis.advice
        remedy = diagnosis.remedy, diagnosis.code, diagnosis.tried
        return cls(step, cause, *texts, None, diagnosis.summary, *remedy, diagnosis.sample)


@dataclass(frozen=True)
class MistakeRecord(Record):
    """A mistake in the script."""

    kind = "mistake"
    name: str
    text: str
    corrected: str
    file: str
    line: int
    source: str

    @classmethod
    def of(cls, mistake: Mistake) -> MistakeRecord:
        """Return the record of a mistake; the file is empty and the line 0 if they are not known."""
        place = mistake.place
        where = ("", 0, "") if place is None else (place.file, place.line, place.source)
        return cls(mistake.name, mistake.text, mistake.corrected, *where)

    @property
    def where(self) -> str:
        """File and line before a text, as "train.py:3: "; empty if they are not known."""
        return f"{self.file}:{self.line}: " if self.file else ""


@dataclass(frozen=True)
class InvariantRecord(Record):
    """An invariant that did not hold."""

    kind = "invariant"
    step: int
    name: str
    text: str
    remedy: str
    severity: str = "warning"
    parameters: tuple[str, ...] = ()

    def in_file(self) -> dict[str, Any]:
        """Return the JSON object for a file, with the first ten parameters."""
        return Record.in_file(replace(self, parameters=self.parameters[:10]))

    @property
    def with_remedy(self) -> str:
        """What was seen, and what to do."""
        return f"{self.text} {self.remedy}"


@dataclass(frozen=True)
class NormsRecord(Record):
    """Norms of parameters' gradients in the steps around a spike of the loss."""

    kind = "norms"
    step: int
    steps: tuple[Annotated[int, _integer(-(2**62))], ...]
    norms: Mapping[str, tuple[float, ...]]

    def in_file(self) -> dict[str, Any]:
        """Return the JSON object for a file, with four digits of each norm."""
        return {**Record.in_file(self), "norms": _rounded(self.norms)}


@dataclass(frozen=True)
class LostRecord(Record):
    """The number of records that could not be written."""

    kind = "lost"
    records: Annotated[int, _integer(1)]


@dataclass(frozen=True)
class AloneRecord(Record):
    """The first step from which on ranks are not recorded together, and the reason."""

    kind = "alone"
    step: int
    why: str


@dataclass(frozen=True)
class EndRecord(Record):
    """The end of a run."""

    kind = "end"
    step: int | None = None


_KINDS: Mapping[str, type[Record]] = {
    cls.kind: cls
    for cls in (
        *(RunRecord, StepRecord, SampleRecord, DiagnosisRecord, MistakeRecord, InvariantRecord),
        *(NormsRecord, LostRecord, AloneRecord, EndRecord),
    )
}


def record_from(value: Any) -> Record | None:
    """Read a record from a JSON object; None for a kind of a later castwise.

    Raises:
        ValueError: It is not a record, or a field is missing or invalid.
    """
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise ValueError('it is not an object with a "kind"')
    return _at(f"a {kind}", _KINDS[kind].from_json, value) if kind in _KINDS else None
