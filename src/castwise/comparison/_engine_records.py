"""Converters of what inference engines return into token records."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any

import torch

from castwise._number_text import several
from castwise._warnings import warn
from castwise.comparison._token_records import TokenRecord, as_list


def from_vllm(outputs: Iterable[Any], routers: Sequence[str | None] = ()) -> list[TokenRecord]:
    """Convert what vLLM's `LLM.generate` returns with `SamplingParams(logprobs=0)` or more, or what its server does.

    Args:
        outputs: `RequestOutput` objects, or mappings with the same names: `prompt_token_ids`, optionally
            `prompt_logprobs`, and `outputs` with `token_ids` and `logprobs`. Or responses of `/v1/completions` or
            `/v1/chat/completions`, requested with `return_token_ids=True` and `logprobs`, of which likeliest tokens are
            not read. vLLM's default, `raw_logprobs`, has no temperature in it. With
            `enable_return_routed_experts=True`, they also have the experts that were chosen: `routed_experts` of shape
            (tokens, layers, experts per token), from a server as base64 of a `.npy` file, for the whole sequence, its
            end, or for what was generated, with `prompt_routed_experts` for the prompt.
        routers: Names of the model's routers, one for each layer of `routed_experts`; None for a layer that has no
            router. Without them, experts are left out, with a warning.

    Raises:
        TypeError: `outputs` is not a list.
        ValueError: The outputs are of another kind, log-probabilities were not requested, or `routers` are not as many
            as the layers.
    """
    records = []
    for output in _listed(outputs, "outputs", "what LLM.generate or the server returns"):
        if (choices := _get(output, "choices")) is not None:
            records += [_of_choice(output, choice, routers) for choice in choices]
            continue
        if _get(output, "prompt_token_ids") is None or _get(output, "outputs") is None:
            raise ValueError("outputs must be what LLM.generate returns, with prompt_token_ids and outputs")
        prompt = as_list(_get(output, "prompt_token_ids"))
        recorded = _get(output, "prompt_logprobs") or [None] * len(prompt)
        of_prompt = _get(output, "prompt_routed_experts")
        for completion in _get(output, "outputs"):
            generated, at_tokens = as_list(_get(completion, "token_ids")), _get(completion, "logprobs")
            if at_tokens is None:
                raise ValueError("the output has no log-probabilities: sample with SamplingParams(logprobs=0) or more")
            tokens = prompt + generated
            recorded_at = [*recorded, *at_tokens]
            log_probs = _of_each(tokens, recorded_at)
            top = [_by_token(at) if _has_likeliest(at) else {} for at in recorded_at]
            chosen = _of_tokens(of_prompt, _get(completion, "routed_experts"), len(prompt), len(generated))
            records.append(TokenRecord(tokens, log_probs, top, _by_router(chosen, routers, len(tokens))))
    return records


def _of_choice(response: Any, choice: Any, routers: Sequence[str | None]) -> TokenRecord:
    """Return the record of one choice of a response of vLLM's server."""
    prompt = _get(choice, "prompt_token_ids") or _get(response, "prompt_token_ids")
    generated, found = _get(choice, "token_ids"), _get(choice, "logprobs")
    if prompt is None or generated is None or found is None:
        raise ValueError(
            "a response of a server must have the ids of tokens and their log-probabilities: request it with "
            "return_token_ids=True and logprobs"
        )
    values = _get(found, "token_logprobs") or [_get(at, "logprob") for at in _get(found, "content") or ()]
    of_prompt = _get(choice, "prompt_logprobs") or _get(response, "prompt_logprobs") or [None] * len(prompt)
    known = _of_each(prompt, of_prompt)
    tokens, experts = [*prompt, *generated], _get(choice, "routed_experts")
    if isinstance(experts, str):  # up to the last token but one, from any token of the prompt on
        import numpy as np

        chosen = as_list(np.load(io.BytesIO(base64.b64decode(experts))))
        chosen = [*[[]] * (len(tokens) - 1 - len(chosen)), *chosen]
    else:
        chosen = _of_tokens(_get(response, "prompt_routed_experts"), experts, len(prompt), len(generated))
    return TokenRecord(tokens, [*known, *values], (), _by_router(chosen, routers, len(tokens)))


def _of_each(tokens: Sequence[int], recorded: Sequence[Any]) -> list[float | None]:
    """Return the log-probabilities of tokens from vLLM's by token id."""
    if len(recorded) != len(tokens):
        raise ValueError(f"log-probabilities must be of each of {len(tokens)} tokens, got {len(recorded)}")
    return [_by_token(at).get(token) for token, at in zip(tokens, recorded, strict=True)]


def _of_tokens(of_prompt: Any, of_completion: Any, prompt: int, generated: int) -> list[Any]:
    """Return vLLM's experts of each token, from the first one on; [] if there are none."""
    if of_completion is None and of_prompt is None:
        return []
    first, rest = (as_list([] if part is None else part) for part in (of_prompt, of_completion))
    if of_prompt is None and len(rest) in (prompt + generated, prompt + generated - 1):
        return rest
    return [*first[:prompt], *[[]] * (prompt - len(first)), *rest]


def from_sglang(
    responses: Iterable[Mapping[str, Any]], prompts: Sequence[Sequence[int]], routers: Sequence[str | None] = ()
) -> list[TokenRecord]:
    """Convert responses of SGLang's `/generate`, or of its `Engine.generate`, with `return_logprob=True`.

    Args:
        responses: Mappings whose `meta_info` has `output_token_logprobs`, a list of (log-probability, token id, text).
            Those of the prompt (`input_token_logprobs`, from `logprob_start_len` on), of the likeliest tokens
            (`input_top_logprobs`, `output_top_logprobs`) and the experts that were chosen (`routed_experts`, for a
            whole sequence) are read where they are given. Sample at temperature 1, or start the server with
            `SGLANG_RETURN_ORIGINAL_LOGPROB=1`: otherwise, log-probabilities have the temperature in them.
        prompts: The token ids of each prompt, in the same order.
        routers: Names of the model's routers, one for each layer that the engine records; None for a layer that has no
            router. Without them, experts are left out, with a warning.

    Raises:
        TypeError: `responses` is not a list.
        ValueError: Prompts and responses are not as many, log-probabilities were not requested, those of the prompt are
            of other tokens, or the recorded experts cannot be those of the tokens and `routers`.
    """
    records, of = [], _listed(responses, "responses", "what /generate or Engine.generate returns")
    prompts = _listed(prompts, "prompts", "the token ids of each prompt")
    if len(of) != len(prompts):
        raise ValueError(f"prompts must have the token ids of each of {len(of)} responses, got {len(prompts)}")
    for response, given in zip(of, prompts, strict=True):
        meta, prompt = _get(response, "meta_info") or {}, as_list(given, "a prompt")
        of_output, of_input = meta.get("output_token_logprobs"), meta.get("input_token_logprobs") or []
        if of_output is None:
            raise ValueError("the response has no meta_info.output_token_logprobs: request it with return_logprob=True")
        unknown = len(prompt) - len(of_input)
        if [int(token) for _, token, *_ in of_input] != prompt[max(0, unknown) :]:
            raise ValueError("meta_info.input_token_logprobs must be of the last tokens of the prompt that is given")
        known = [(int(token), value) for value, token, *_ in (*of_input, *of_output)]
        tokens = [*prompt[:unknown], *(token for token, _ in known)]
        log_probs = [None if value is None else float(value) for _, value in known]
        tops = [
            {int(token): float(value) for value, token, *_ in at or ()}
            for at in chain(
                meta.get("input_top_logprobs") or [None] * len(of_input),
                meta.get("output_top_logprobs") or [None] * len(of_output),
            )
        ]
        chosen = _decoded(meta.get("routed_experts"), len(tokens), routers)
        records.append(
            TokenRecord(
                tokens,
                [*[None] * unknown, *log_probs],
                [*[{}] * unknown, *tops] if any(tops) else (),
                _by_router(chosen, routers, len(tokens)),
            )
        )
    return records


def _decoded(encoded: Any, tokens: int, routers: Sequence[str | None]) -> list[Any]:
    """Return SGLang's experts, base64 of int32 of shape (tokens - 1, layers, experts per token); [] for None."""
    if not isinstance(encoded, str):
        return [] if encoded is None else as_list(encoded)
    chosen = torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.int32)
    layers = len(routers) or 1
    if tokens < 2 or chosen.numel() % ((tokens - 1) * layers):
        raise ValueError(
            f"meta_info.routed_experts has {chosen.numel():,} numbers, which is not a multiple of {tokens - 1:,} "
            f"tokens by {several(layers, 'router')}: name a router, or None, for each layer, and request the whole "
            "sequence"
        )
    return as_list(chosen.view(tokens - 1, layers, -1))


def _by_router(chosen: list[Any], routers: Sequence[str | None], tokens: int) -> dict[str, list[list[int]]]:
    """Return the experts of each token by the name of the router.

    Args:
        chosen: For each token from the first one on, the experts of each layer; empty where they were not recorded.
        routers: The names of the routers by layer.
        tokens: The number of tokens, of which engines record no experts for the last one.
    """
    if not any(chosen):
        return {}
    if not routers:
        warn("the records have experts, which are left out: name the model's routers with routers=[...]", UserWarning)
        return {}
    layers = {len(at) for at in chosen if at}
    if layers != {len(routers)}:
        raise ValueError(
            f"the experts are those of {' or '.join(map(str, sorted(layers)))} layers, but routers names "
            f"{len(routers)}: name a router, or None, for each layer"
        )
    padded = [*chosen, *[[]] * (tokens - len(chosen))][:tokens]
    return {
        name: [_recorded(at[layer]) if at else [] for at in padded]
        for layer, name in enumerate(routers)
        if name is not None
    }


def _recorded(experts: Sequence[int]) -> list[int]:
    """Return the experts of one token; [] where vLLM has -1, because they were in its cache."""
    return [] if any(expert < 0 for expert in experts) else list(experts)


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
        ValueError: The output has no logits, their number is not that of the generated tokens, or the output is that of
            beam search.
    """
    sequences, logits = _get(output, "sequences"), _get(output, "logits")
    if sequences is None or logits is None:
        raise ValueError("the output has no logits: generate with return_dict_in_generate=True, output_logits=True")
    if _get(output, "beam_indices") is not None:
        raise ValueError(
            "the output is that of beam search, whose logits are those of beams: generate with num_beams=1"
        )
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


def _listed(values: Any, name: str, what: str) -> list[Any]:
    if not isinstance(values, Iterable) or isinstance(values, (str, Mapping)):
        raise TypeError(f"{name} must be a list of {what}, got {type(values).__name__}")
    return list(values)


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _by_token(at: Mapping[Any, Any] | None) -> dict[int, float]:
    """Return log-probabilities by token id of one position, where vLLM has objects with a `logprob`."""
    if at is None:
        return {}
    return {
        int(token): float(value if isinstance(value, Real) else _get(value, "logprob")) for token, value in at.items()
    }


def _has_likeliest(at: Mapping[Any, Any] | None) -> bool:
    """Return False if the likeliest token is not among those of one position, as may be with `logprobs=0`."""
    ranks = [None if isinstance(value, Real) else _get(value, "rank") for value in (at or {}).values()]
    return 1 in ranks or all(rank is None for rank in ranks)
