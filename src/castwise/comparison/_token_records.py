"""Tokens with the log-probabilities that an inference engine recorded: reading and conversion."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_COLUMNS = ("sequence", "token", "log_prob")


@dataclass(frozen=True)
class TokenRecord:
    """One sequence of tokens, with the log-probabilities that were recorded for them.

    Args:
        tokens: Token ids of the prompt and of what was generated.
        log_probs: For each token, its log-probability given all tokens before it, in nats, at temperature 1; None where
            it was not recorded, as for a prompt, and for the first token.
        top: For each token, the log-probabilities of the likeliest tokens by id; empty where they were not recorded.
        experts: Expert ids that a mixture of experts chose, by the name of the router in the model: a list for each
            token, empty where it was not recorded.

    Raises:
        ValueError: The lists have different lengths, or the first token has a log-probability.
        TypeError: A token is not an integer, or a log-probability is not a number.
    """

    tokens: Sequence[int]
    log_probs: Sequence[float | None]
    top: Sequence[Mapping[int, float]] = ()
    experts: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {"log_probs": self.log_probs, **({"top": self.top} if self.top else {}), **self.experts}
        for name, values in lengths.items():
            if len(values) != len(self.tokens):
                raise ValueError(f"{name} must have an entry for each of {len(self.tokens)} tokens, got {len(values)}")
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in self.tokens):
            raise TypeError("tokens must be a list of integer ids")
        if not all(value is None or isinstance(value, (int, float)) for value in self.log_probs):
            raise TypeError("log_probs must be a list of numbers, with None where nothing was recorded")
        if self.log_probs and self.log_probs[0] is not None:
            raise ValueError(
                "the first token has no tokens before it, so its log-probability must be None: give the tokens of the "
                "prompt as well, with None for each"
            )


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
        top = tuple({int(token): value for token, value in (at or {}).items()} for at in row.get("top") or ())
        return TokenRecord(list(row["tokens"]), list(row["log_probs"]), top, dict(row.get("experts") or {}))
    except (TypeError, ValueError) as error:
        raise type(error)(f"records[{number}]: {error}") from error


def _described(row: Any) -> str:
    return f"the keys {sorted(map(str, row))}" if isinstance(row, Mapping) else type(row).__name__


def _of_frame(frame: Any) -> Iterator[TokenRecord]:
    """Yield the sequences of a data frame with a row for each token."""
    missing = [name for name in _COLUMNS if name not in frame.columns]
    if missing:
        raise ValueError(f"the data frame must have the columns {', '.join(_COLUMNS)}, and has no {', '.join(missing)}")
    for _, rows in frame.groupby("sequence", sort=False):
        log_probs = [None if value is None or math.isnan(value) else float(value) for value in rows["log_prob"]]
        yield TokenRecord([int(token) for token in rows["token"]], log_probs)


def from_vllm(outputs: Iterable[Any]) -> list[TokenRecord]:
    """Convert what vLLM's `LLM.generate` returns with `SamplingParams(logprobs=0)` or more.

    Args:
        outputs: `RequestOutput` objects, or mappings with the same names: `prompt_token_ids`, optionally
            `prompt_logprobs`, and `outputs` with `token_ids` and `logprobs`. vLLM's default, `raw_logprobs`, has no
            temperature in it.

    Raises:
        ValueError: Log-probabilities were not requested.
    """
    records = []
    for output in outputs:
        prompt = list(_get(output, "prompt_token_ids"))
        recorded = _get(output, "prompt_logprobs") or [None] * len(prompt)
        for completion in _get(output, "outputs"):
            generated, at_tokens = list(_get(completion, "token_ids")), _get(completion, "logprobs")
            if at_tokens is None:
                raise ValueError("the output has no log-probabilities: sample with SamplingParams(logprobs=0) or more")
            tokens = prompt + generated
            top = [_by_token(at) for at in (*recorded, *at_tokens)]
            log_probs = [at.get(token) for token, at in zip(tokens, top, strict=True)]
            records.append(TokenRecord(tokens, log_probs, top))
    return records


def from_sglang(responses: Iterable[Mapping[str, Any]], prompts: Sequence[Sequence[int]]) -> list[TokenRecord]:
    """Convert responses of SGLang's `/generate`, or of its `Engine.generate`, with `return_logprob=True`.

    Args:
        responses: Mappings whose `meta_info` has `output_token_logprobs`, a list of (log-probability, token id, text).
        prompts: The token ids of each prompt, in the same order.

    Raises:
        ValueError: Log-probabilities were not requested.
    """
    records = []
    for response, prompt in zip(responses, prompts, strict=True):
        of_output = response.get("meta_info", {}).get("output_token_logprobs")
        if of_output is None:
            raise ValueError("the response has no meta_info.output_token_logprobs: request it with return_logprob=True")
        generated = [(int(token), float(value)) for value, token, *_ in of_output]
        tokens = [*map(int, prompt), *(token for token, _ in generated)]
        records.append(TokenRecord(tokens, [*[None] * len(prompt), *(value for _, value in generated)]))
    return records


def from_transformers(
    output: Any, prompt_length: int, eos_token_id: int | Sequence[int] | None = None
) -> list[TokenRecord]:
    """Convert what `generate(..., return_dict_in_generate=True, output_logits=True)` of Transformers returns.

    Args:
        output: The output, with `sequences` of shape (batch, tokens), and `logits`, a tensor of shape (batch, classes)
            for each generated token. Not for beam search, and not for padded prompts.
        prompt_length: Number of tokens in each prompt.
        eos_token_id: The token or tokens that end a sequence, as in `generation_config`. The padding after the first of
            them is left out; None leaves nothing out.

    Raises:
        ValueError: The output has no logits, or their number is not that of the generated tokens.
    """
    sequences, logits = output.sequences, output.logits
    if logits is None:
        raise ValueError("the output has no logits: generate with return_dict_in_generate=True, output_logits=True")
    generated = sequences[:, prompt_length:]
    if generated.shape[1] != len(logits):
        raise ValueError(
            f"sequences have {generated.shape[1]} tokens after a prompt of {prompt_length}, but there are "
            f"{len(logits)} logits: give the length of the prompt, and no beam search"
        )
    log_probs = torch.stack([step.double().log_softmax(-1) for step in logits], 1)
    chosen = log_probs.gather(-1, generated.unsqueeze(-1).to(log_probs.device)).squeeze(-1)
    before: list[float | None] = [None] * prompt_length
    ends = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    records = []
    for tokens, values in zip(sequences.tolist(), chosen.tolist(), strict=True):
        last = next((place for place in range(prompt_length, len(tokens)) if tokens[place] in ends), len(tokens))
        records.append(TokenRecord(tokens[: last + 1], [*before, *values][: last + 1]))
    return records


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _by_token(at: Mapping[Any, Any] | None) -> dict[int, float]:
    """Return log-probabilities by token id of one position, where vLLM has objects with a `logprob`."""
    if at is None:
        return {}
    values = {int(token): value if isinstance(value, float) else _get(value, "logprob") for token, value in at.items()}
    return {token: float(value) for token, value in values.items()}
