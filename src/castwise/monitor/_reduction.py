"""Reduce what the ranks have measured to one result on rank 0, as tensors of sums and maxima."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from castwise.monitor._exchange import Exchange, Headers, NoExchangeError, ranks_text
from castwise.monitor._records import QuantizedLayer
from castwise.monitor._sample import GradientTallies, Measured
from castwise.monitor._tally import Tally

_NONE = -(2**15)  # below every exponent
_NOTHING = Tally()


@dataclass(frozen=True)
class Layout:
    """Names of what ranks have measured, in the order of their numbers in `Packed`.

    Args:
        gradients: By parameter the number of distinct parts (see `_local_shards.LocalShard`), and the shape of all
            parts together if it is known.
        modules: Names of the parameters that each module owns.
        activations: Dtypes of outputs by module; "" if it is not known.
        updates, partial_sums: Names of parameters.
    """

    gradients: Mapping[str, tuple[int | None, Sequence[int] | None]]
    modules: Mapping[str, Sequence[str]]
    activations: Mapping[str, str]
    updates: Sequence[str]
    partial_sums: Sequence[str]

    def to_bytes(self) -> bytes:
        """Return JSON for other ranks, the same for the same layout."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Layout:
        """Return the layout that another rank has sent."""
        return cls(**json.loads(text))


def layout_of(measured: Measured) -> Layout:
    """Return the layout of one rank's measurements."""
    return Layout(
        {name: (part.distinct, part.shape) for name, part in measured.gradients.items()},
        measured.modules,
        {name: measured.dtypes.get(name, "") for name in measured.activations},
        tuple(measured.updates),
        tuple(measured.partial_sums),
    )


def joined(layouts: Mapping[int, Layout]) -> Layout:
    """Return the layout of several ranks together, in order of first occurrence.

    Raises:
        NoExchangeError: The ranks watch different models: a parameter has different shapes.
    """
    gradients: dict[str, tuple[int | None, Sequence[int] | None]] = {}
    modules: dict[str, dict[str, None]] = {}
    activations: dict[str, str] = {}
    for rank, layout in layouts.items():
        for name, (distinct, shape) in layout.gradients.items():
            known = gradients.setdefault(name, (distinct, shape))[1]
            if None not in (known, shape) and list(known or ()) != list(shape or ()):
                text = f"its {name} has shape {list(shape or ())}, not {list(known or ())}"
                raise NoExchangeError(f"{ranks_text([rank])} trains another model: {text}")
        for name, own in layout.modules.items():
            modules.setdefault(name, {}).update(dict.fromkeys(own))
        for name, dtype in layout.activations.items():
            activations.setdefault(name, dtype)
    return Layout(
        gradients,
        {name: tuple(own) for name, own in modules.items()},
        activations,
        *(
            tuple(dict.fromkeys(name for layout in layouts.values() for name in getattr(layout, kind)))
            for kind in ("updates", "partial_sums")
        ),
    )


class Packed(NamedTuple):
    """One rank's measurements, or those of all ranks, as tensors. The operation that combines ranks is in brackets."""

    counts: torch.Tensor
    """int64 (sum): of each tally the elements, zeros, non-finite ones, and elements by exponent; then, for each
    gradient, 1 if the rank has a part of it."""
    extremes: torch.Tensor
    """fp64 (maximum): of each tally the largest and minus the smallest magnitude."""
    sums: torch.Tensor
    """fp64 (sum): the squares of each gradient, the four numbers of each update."""


def spans(layout: Layout, measured: Measured) -> torch.Tensor:
    """Return the highest exponent and minus the lowest of each tally: int32, shape (tallies, 2); combine by maximum."""
    rows = [
        (max(tally.counts), -min(tally.counts)) if tally.counts else (_NONE, _NONE)
        for tally in _tallies(layout, measured)
    ]
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 2)


def pack(layout: Layout, of_all: torch.Tensor, measured: Measured) -> Packed:
    """Pack one rank's measurements.

    Args:
        layout: The joined layout of all ranks.
        of_all: The combined spans of all ranks.
        measured: What this rank has measured; names that it lacks count as nothing.
    """
    tallies = _tallies(layout, measured)
    counts: list[int] = []
    for tally, exponents in zip(tallies, _exponents(of_all), strict=True):
        counts += (tally.numel, tally.zero, tally.nonfinite, *(tally.counts.get(exponent, 0) for exponent in exponents))
    counts += (int(name in measured.gradients) for name in layout.gradients)
    squares = [measured.gradients[name].squares if name in measured.gradients else 0.0 for name in layout.gradients]
    updates = [number for name in layout.updates for number in measured.updates.get(name, [0.0] * 4)]
    return Packed(
        torch.tensor(counts, dtype=torch.int64),
        torch.tensor([[tally.largest, -tally.smallest] for tally in tallies], dtype=torch.float64),
        torch.tensor(squares + updates, dtype=torch.float64),
    )


def unpack(layout: Layout, of_all: torch.Tensor, packed: Packed, quantized: Mapping[str, QuantizedLayer]) -> Measured:
    """Return the measurements of all ranks together: parts of a tensor add up, copies count once.

    Args:
        layout, of_all: As for `pack`.
        packed: The combined numbers.
        quantized: The results of rank 0, see `Measured`.
    """
    counts, sums = packed.counts.tolist(), packed.sums.tolist()
    tallies, position = [], 0
    for exponents, (largest, below) in zip(_exponents(of_all), packed.extremes.tolist(), strict=True):
        numel, zero, nonfinite, *by_exponent = counts[position : position + 3 + len(exponents)]
        position += 3 + len(exponents)
        of_exponents = {exponent: n for exponent, n in zip(exponents, by_exponent, strict=True) if n}
        tallies.append(Tally(numel, zero, nonfinite, largest, -below, of_exponents))
    gradients = {
        name: _without_copies(tallies[2 * index], tallies[2 * index + 1], distinct, counts[position + index], squares)
        for index, ((name, (distinct, _)), squares) in enumerate(zip(layout.gradients.items(), sums, strict=False))
    }
    number = len(layout.gradients)
    return Measured(
        gradients,
        {name: list(own) for name, own in layout.modules.items()},
        dict(zip(layout.activations, tallies[2 * number :], strict=True)),
        {name: sums[number + 4 * index :][:4] for index, name in enumerate(layout.updates)},
        quantized,
        layout.partial_sums,
        {name: dtype for name, dtype in layout.activations.items() if dtype},
    )


class Reduction:
    """Reduces samples to rank 0. Remembers which names the ranks have, and sends them only where they are new.

    Args:
        exchange: The exchange of all ranks.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._layouts: dict[int, Layout] = {}  # by digest: the same on all ranks
        self._joined: tuple[tuple[int | None, ...], Layout] = ((), joined({}))

    def __call__(self, step: int, measured: Measured | None, every: int) -> Measured:
        """Return the measurements of all ranks on rank 0, this rank's on the others.

        Args:
            step: Number of the step.
            measured: What this rank has measured; None if that failed.
            every: Steps between two samples, which must be the same on all ranks.

        Raises:
            NoExchangeError: The exchange is over.
        """
        own = Measured() if measured is None else measured
        text = layout_of(own).to_bytes()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        numbers = None if measured is None else [every, digest, len(text)]
        with self._exchange.at("sample", step, numbers) as headers:
            _check_every(headers)
            layout = self._layout(headers, text, digest)
            of_all = spans(layout, own)
            if not len(of_all) and not layout.updates:
                return own
            self._exchange.maximum(of_all)
            packed = pack(layout, of_all, own)
            self._exchange.sum_on_first(packed.counts)
            self._exchange.maximum_on_first(packed.extremes)
            self._exchange.sum_on_first(packed.sums)
            return own if self._exchange.rank else unpack(layout, of_all, packed, own.quantized)

    def _layout(self, headers: Headers, text: bytes, digest: int) -> Layout:
        digests = tuple(None if header is None else header[1] for header in headers)
        if digests == self._joined[0]:
            return self._joined[1]
        if set(digests) == {digest}:  # nothing to send
            self._layouts.setdefault(digest, Layout.from_bytes(text))
        for rank, header in enumerate(headers):
            if header is not None and header[1] not in self._layouts:
                sent = torch.zeros(header[2], dtype=torch.uint8)
                if rank == self._exchange.rank:
                    sent.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
                self._exchange.broadcast(sent, rank)
                self._layouts[header[1]] = Layout.from_bytes(bytes(sent.tolist()))
        ranks = {found: rank for rank, found in reversed([*enumerate(digests)]) if found is not None}
        first = {rank: self._layouts[found] for found, rank in sorted(ranks.items(), key=lambda item: item[1])}
        self._joined = digests, joined(first)
        return self._joined[1]


def _check_every(headers: Headers) -> None:
    given = {rank: header[0] for rank, header in enumerate(headers) if header is not None}
    first = next(iter(given), 0)
    others = [rank for rank, every in given.items() if every != given[first]]
    if others:
        text = f"every is {given[first]} on rank {first} and {given[others[0]]} on {ranks_text(others)}"
        raise NoExchangeError(f"{text}: pass the same")


def _tallies(layout: Layout, measured: Measured) -> list[Tally]:
    tallies: list[Tally] = []
    for name in layout.gradients:
        part = measured.gradients.get(name)
        tallies += (_NOTHING, _NOTHING) if part is None else (part.scaled, part.unscaled)
    return tallies + [measured.activations.get(name, _NOTHING) for name in layout.activations]


def _exponents(of_all: torch.Tensor) -> list[range]:
    return [range(-minus_lowest, highest + 1) for highest, minus_lowest in of_all.tolist()]


def _without_copies(scaled: Tally, unscaled: Tally, distinct: int | None, held: int, squares: float) -> GradientTallies:
    number = held if distinct is None else distinct
    return GradientTallies(
        scaled.of_copies(held, number), unscaled.of_copies(held, number), distinct, squares * number / held
    )
