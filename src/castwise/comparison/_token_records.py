"""Tokens with the log-probabilities that an inference engine recorded: what a record is, and reading."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_COLUMNS = ("sequence", "token", "log_prob")
_LARGEST = 0.01  # of a log-probability: 0, and the rounding of a logarithm of a sum in bf16


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
        ValueError: The lists have different lengths, a log-probability is not finite or above 0 by more than rounding,
            or the first token has one.
        TypeError: A token is not an integer, or a log-probability is not a number.
    """

    tokens: Sequence[int]
    log_probs: Sequence[float | None]
    top: Sequence[Mapping[int, float]] = ()
    experts: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        experts = {name: [as_list(chosen) for chosen in as_list(choices)] for name, choices in self.experts.items()}
        object.__setattr__(self, "tokens", as_list(self.tokens))
        object.__setattr__(self, "log_probs", _as_log_probs(self.log_probs))
        object.__setattr__(self, "experts", experts)
        lengths = {"log_probs": self.log_probs, **({"top": self.top} if self.top else {}), **self.experts}
        for name, values in lengths.items():
            if len(values) != len(self.tokens):
                raise ValueError(f"{name} must have an entry for each of {len(self.tokens)} tokens, got {len(values)}")
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in self.tokens):
            raise TypeError("tokens must be a list of integer ids")
        if any(token < 0 for token in self.tokens):
            raise ValueError(f"tokens must be ids >= 0, got {min(self.tokens)}")
        if not all(value is None or isinstance(value, float) for value in self.log_probs):
            raise TypeError("log_probs must be a list of numbers, with None where nothing was recorded")
        for place, value in enumerate(self.log_probs):
            if value is not None and not (math.isfinite(value) and value <= _LARGEST):
                hint = ": record them before top_k and top_p exclude tokens" if value == -math.inf else ""
                raise ValueError(
                    f"log_probs[{place}] must be the finite logarithm of a probability, so at most 0, or None, got "
                    f"{value}{hint}"
                )
        if self.log_probs and self.log_probs[0] is not None:
            raise ValueError(
                "the first token has no tokens before it, so its log-probability must be None: give the tokens of the "
                "prompt as well, with None for each"
            )


def as_list(values: Any) -> list[Any]:
    """Return a list, an array or a tensor as a list of Python's own numbers."""
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]


def _as_log_probs(values: Any) -> list[Any]:
    found = [float(value) if isinstance(value, int) else value for value in as_list(values)]
    return [None if _is_missing(value) else value for value in found] if hasattr(values, "tolist") else found


def read_records(records: Any) -> list[TokenRecord]:
    """Return token records from any of the forms that `compare_log_probs` accepts.

    Raises:
        OSError: A file cannot be read.
        TypeError, ValueError: A record is not of the documented form; the message names it.
    """
    if isinstance(records, (str, os.PathLike)):
        rows: Iterable[Any] = _lines(Path(records))
    elif hasattr(records, "groupby") and hasattr(records, "columns"):
        rows = _of_frame(records)
    elif isinstance(records, Iterable) and not isinstance(records, Mapping):
        rows = records
    else:
        raise TypeError(
            f"records must be a file of JSON lines, a data frame, or a list of records, got {type(records).__name__}"
        )
    found = [row if isinstance(row, TokenRecord) else _of_mapping(row, number) for number, row in enumerate(rows)]
    if not any(value is not None for record in found for value in record.log_probs):
        raise ValueError("records must have at least one log-probability, got none")
    return found


def _lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number} is not JSON: {error}") from error


def _of_mapping(row: Any, number: int) -> TokenRecord:
    if not isinstance(row, Mapping) or not {"tokens", "log_probs"} <= row.keys():
        raise ValueError(
            f'records[{number}] must be a mapping with "tokens" and "log_probs" (and optionally "top" and "experts"), '
            f"got {_described(row)}: castwise.comparison.from_vllm, from_sglang and from_transformers convert the "
            "outputs of these libraries"
        )
    try:
        top = tuple(_top(at) for at in row.get("top") or ())
        return TokenRecord(row["tokens"], row["log_probs"], top, dict(row.get("experts") or {}))
    except (TypeError, ValueError) as error:
        raise type(error)(f"records[{number}]: {error}") from error


def _described(row: Any) -> str:
    return f"the keys {sorted(map(str, row))}" if isinstance(row, Mapping) else type(row).__name__


def _top(value: Any) -> dict[int, float]:
    """Return the likeliest tokens of one position by id; {} for None."""
    return {int(token): float(log_prob) for token, log_prob in _entries(value).items()}


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
    for sequence, rows in frame.groupby("sequence", sort=False):
        log_probs = [None if _is_missing(value) else float(value) for value in rows["log_prob"]]
        top = tuple(map(_top, rows["top"])) if "top" in frame.columns else ()
        chosen = [_entries(at) for at in rows["experts"]] if "experts" in frame.columns else []
        experts = {name: [at.get(name, ()) for at in chosen] for at in chosen for name in at}
        try:
            yield TokenRecord([int(token) for token in rows["token"]], log_probs, top, experts)
        except (TypeError, ValueError) as error:
            raise type(error)(f"sequence {sequence!r} of the data frame: {error}") from error
