"""Tokens with the log-probabilities that an inference engine recorded: what a record is, and reading."""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, starmap
from numbers import Integral
from pathlib import Path
from typing import Any

_COLUMNS = ("sequence", "token", "log_prob")
_LARGEST = 0.01  # of a log-probability: 0, and the rounding of a logarithm of a sum in bf16
_EXCLUDED = -9999.0  # what vLLM's server writes for -inf, which JSON has not


@dataclass(frozen=True)
class TokenRecord:
    """One sequence of tokens, with the log-probabilities that were recorded for them.

    Each list may also be a NumPy array or a tensor.

    Args:
        tokens: Token ids of the prompt and of what was generated.
        log_probs: For each token, its log-probability given all tokens before it, in nats, at temperature 1; None, or
            NaN in an array or a tensor, where it was not recorded, as for a prompt, and for the first token.
        top: For each token, the log-probabilities of the likeliest tokens by id; empty where they were not recorded.
        experts: Expert ids that a mixture of experts chose, by the name of the router in the model: a list for each
            token, empty where it was not recorded.

    Raises:
        ValueError: The lists have different lengths, a log-probability is not finite, above 0 by more than rounding, or
            -9999.0, which vLLM's server writes for -inf, or the first token has one.
        TypeError: A token is not an integer, or a log-probability is not a number.
    """

    tokens: Sequence[int]
    log_probs: Sequence[float | None]
    top: Sequence[Mapping[int, float]] = ()
    experts: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        experts = {name: _as_experts(choices, f"experts[{name!r}]") for name, choices in self.experts.items()}
        object.__setattr__(self, "tokens", as_list(self.tokens, "tokens"))
        object.__setattr__(self, "log_probs", _as_log_probs(self.log_probs))
        object.__setattr__(self, "experts", experts)
        lengths = {"log_probs": self.log_probs, **({"top": self.top} if self.top else {}), **self.experts}
        for name, values in lengths.items():
            if len(values) != len(self.tokens):
                raise ValueError(f"{name} must have an entry for each of {len(self.tokens)} tokens, got {len(values)}")
        for token in self.tokens:
            if not isinstance(token, int) or isinstance(token, bool):
                raise TypeError(f"tokens must be a list of integer ids, got {token!r}")
        if any(token < 0 for token in self.tokens):
            raise ValueError(f"tokens must be ids >= 0, got {min(self.tokens)}")
        for name, lists in (("top", self.top), *((f"experts[{name!r}]", chosen) for name, chosen in experts.items())):
            if not all(issubclass(kind, Integral) for kind in set(map(type, chain.from_iterable(lists)))):
                raise TypeError(f"{name} must have integer ids")
            if (lowest := min(chain.from_iterable(lists), default=0)) < 0:
                raise ValueError(f"{name} must have ids >= 0, got {lowest}")
        if not all(value is None or isinstance(value, float) for value in self.log_probs):
            raise TypeError("log_probs must be a list of numbers, with None where nothing was recorded")
        for place, value in enumerate(self.log_probs):
            if value is not None and not (math.isfinite(value) and value <= _LARGEST and value != _EXCLUDED):
                excluded = value in (-math.inf, _EXCLUDED)
                hint = ": record them before top_k and top_p exclude tokens" if excluded else ""
                raise ValueError(
                    f"log_probs[{place}] must be the finite logarithm of a probability, so at most 0, or None, got "
                    f"{value}{hint}"
                )
        if self.log_probs and self.log_probs[0] is not None:
            raise ValueError(
                "the first token has no tokens before it, so its log-probability must be None: give the tokens of the "
                "prompt as well, with None for each"
            )


def as_list(values: Any, name: str = "what was recorded") -> list[Any]:
    """Return a list, an array or a tensor as a list of Python's own numbers."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, got {values!r}")
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]


def _as_experts(choices: Any, name: str) -> list[list[int]]:
    return [[] if chosen is None else as_list(chosen, f"an entry of {name}") for chosen in as_list(choices, name)]


def _as_log_probs(values: Any) -> list[Any]:
    found = [float(value) if isinstance(value, int) else value for value in as_list(values, "log_probs")]
    return [None if _is_missing(value) else value for value in found] if hasattr(values, "tolist") else found


def read_records(records: Any) -> list[TokenRecord]:
    """Return token records from any of the forms that `compare_log_probs` accepts.

    Raises:
        OSError: A file cannot be read.
        TypeError, ValueError: A record is not of the documented form; the message names it.
    """
    if isinstance(records, (str, os.PathLike)):
        rows: Iterable[Any] = starmap(_of_mapping, _lines(Path(records)))
    elif hasattr(records, "groupby") and hasattr(records, "columns"):
        rows = _of_frame(records)
    elif isinstance(records, Iterable) and not isinstance(records, Mapping):
        rows = (_of_mapping(f"records[{number}]", row) for number, row in enumerate(records))
    else:
        raise TypeError(
            f"records must be a file of JSON lines, a data frame, or a list of records, got {type(records).__name__}"
        )
    found = list(rows)
    if not any(value is not None for record in found for value in record.log_probs):
        raise ValueError("records must have at least one log-probability, got none")
    return found


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield where each line of a file is, and what it says."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        number = 0
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is not a complete gzip file: {error}") from error


def _of_mapping(where: str, row: Any) -> TokenRecord:
    if isinstance(row, TokenRecord):
        return row
    if not isinstance(row, Mapping) or not {"tokens", "log_probs"} <= row.keys():
        raise ValueError(
            f'{where} must be a mapping with "tokens" and "log_probs" (and optionally "top" and "experts"), '
            f"got {_described(row)}: castwise.comparison.from_vllm, from_sglang and from_transformers convert the "
            "outputs of these libraries"
        )
    try:
        top = tuple(map(_top, as_list(row.get("top") or (), "top")))
        if not isinstance(experts := row.get("experts") or {}, Mapping):
            raise TypeError(f"experts must be a mapping by the names of routers, got {type(experts).__name__}")
        return TokenRecord(row["tokens"], row["log_probs"], top, experts)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error


def _described(row: Any) -> str:
    return f"the keys {sorted(map(str, row))}" if isinstance(row, Mapping) else type(row).__name__


def _top(value: Any) -> dict[int, float]:
    """Return the likeliest tokens of one position by id; {} for None."""
    try:
        return {int(token): float(log_prob) for token, log_prob in _entries(value).items()}
    except (TypeError, ValueError) as error:
        raise TypeError(f"an entry of top must map token ids to log-probabilities, got {value!r}") from error


def _entries(value: Any) -> dict[Any, Any]:
    """Return a mapping, the pairs of one, or None, without entries that are None: how files of columns have them."""
    pairs = value.items() if isinstance(value, Mapping) else () if _is_missing(value) else value
    return {key: item for key, item in pairs if item is not None}


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _of_frame(frame: Any) -> Iterator[TokenRecord]:
    """Yield the sequences of a data frame with a row for each token."""
    missing = [name for name in _COLUMNS if name not in frame.columns]
    if missing:
        raise ValueError(f"the data frame must have the columns {', '.join(_COLUMNS)}, and has no {', '.join(missing)}")
    if (unnamed := frame["sequence"].isna().to_numpy()).any():
        raise ValueError(f"the data frame has no sequence in the row {frame.index[unnamed.argmax()]!r}")
    for sequence, rows in frame.groupby("sequence", sort=False):
        try:
            log_probs = [None if value is None else float(value) for value in _column(rows, "log_prob")]
            top = tuple(map(_top, _column(rows, "top")))
            chosen = [_entries(at) for at in _column(rows, "experts")]
            experts = {name: [at.get(name, ()) for at in chosen] for name in dict.fromkeys(chain.from_iterable(chosen))}
            tokens = [int(token) if _is_whole(token) else token for token in _column(rows, "token")]
            yield TokenRecord(tokens, log_probs, top, experts)
        except (TypeError, ValueError) as error:
            raise type(error)(f"sequence {sequence!r} of the data frame: {error}") from error


def _column(frame: Any, name: str) -> list[Any]:
    """Return a column as Python's own objects, with None for a missing value of any dtype; [] if there is none."""
    if name not in frame.columns:
        return []
    values = frame[name].astype(object)
    return [None if missing else value for value, missing in zip(values, values.isna(), strict=True)]


def _is_whole(value: Any) -> bool:
    """Return True for a float that is an integer: columns of integers become floats beside a missing value."""
    return isinstance(value, float) and value.is_integer()
