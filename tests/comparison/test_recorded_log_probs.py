"""Recorded log-probabilities beside a model's: figures as computed by hand, forms of records, and what is refused."""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pandas
import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise.comparison import (
    PrecisionShare,
    RecordedDrift,
    TokenRecord,
    compare_log_probs,
    from_sglang,
    from_transformers,
    from_vllm,
)
from castwise.comparison._token_records import read_records

CLASSES = 16


class Experts(nn.Module):
    """A language model with a router, whose scores choose between two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 8)
        self.router = nn.Linear(8, 4)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(tokens)
        weight = self.router(hidden).topk(2).values.sum(-1, keepdim=True)
        return {"logits": 8 * self.head(hidden * weight)}


@pytest.fixture
def model() -> Experts:
    torch.manual_seed(0)
    return Experts().eval()


def log_probs(model: nn.Module, tokens: list[int], dtype: torch.dtype | None = None) -> list[float | None]:
    row = torch.tensor([tokens])
    with torch.inference_mode(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        found = model(row[:, :-1])["logits"].double().log_softmax(-1)
    return [None, *found[0].gather(1, row[0, 1:, None]).flatten().tolist()]


def moved(record: dict[str, Any], *differences: float) -> dict[str, Any]:
    """Move the last log-probabilities of a record."""
    values = record["log_probs"]
    kept = len(values) - len(differences)
    return record | {"log_probs": values[:kept] + [a + b for a, b in zip(values[kept:], differences, strict=True)]}


def test_figures_are_those_computed_by_hand_by_sequence_position_and_token(model: Experts) -> None:
    first = {"tokens": [3, 1, 4, 1, 5], "log_probs": log_probs(model, [3, 1, 4, 1, 5])}
    long = list(range(16)) * 2
    second = {"tokens": long, "log_probs": log_probs(model, long)}
    second["log_probs"][1:8] = [None] * 7  # the prompt
    found = compare_log_probs(model, [first, moved(second, 0.0, -0.5, 0.25)])
    assert found.summary.tokens == 4 + 24
    assert found.summary.mean_difference == pytest.approx(0.75 / 28)
    assert found.summary.largest_difference == pytest.approx(0.5)
    assert found.summary.kl_k1 == pytest.approx(-0.25 / 28), "the sampled ratio is model over record"
    assert found.summary.outside_band == pytest.approx(2 / 28)
    assert list(found.sequences) == [1, 0], "largest first"
    assert [(group, drift.tokens) for group, drift in found.positions.items()] == [((0, 15), 20), ((16, 47), 8)]
    assert found.positions[0, 15].largest_difference == pytest.approx(0.0, abs=1e-6)
    worst, of_worst = next(iter(found.tokens.items()))
    assert (worst, of_worst.tokens, of_worst.largest_difference) == (14, 2, pytest.approx(0.5))
    assert (of_worst.kl_k1, of_worst.outside_band) == (pytest.approx(-0.25), 0.5)
    assert of_worst.kl_k3 == pytest.approx((math.exp(0.5) - 1.5) / 2)
    assert sum(drift.tokens for drift in found.tokens.values()) == 28
    by_token = str(found).partition("by token")[2]
    assert by_token.split()[:9] == ["token", "tokens", "mean", "|log", "ratio|", "largest", "KL", "k1", "KL"]
    assert by_token.splitlines()[2].split()[-1] == "50%"
    assert (found.precision, found.drift, found.best_differs, dict(found.experts)) == (None, None, None, {})


def test_what_rounding_explains_and_what_is_left_for_the_engine(model: Experts) -> None:
    sequences = torch.randint(CLASSES, (4, 12)).tolist()
    of_bf16 = [{"tokens": row, "log_probs": log_probs(model, row, torch.bfloat16)} for row in sequences]
    rounded = compare_log_probs(model, of_bf16, engine=castwise.policies.bf16, worst=2)
    assert rounded.precision is not None
    assert rounded.precision.share == pytest.approx(1.0)
    assert rounded.precision.left == pytest.approx(0.0, abs=1e-6)
    assert rounded.drift is not None
    assert rounded.drift.batches == 2
    assert "what the precision of `engine` alone changes, in the 2 sequences with the largest" in str(rounded)
    drift = rounded.drift["engine"].summary.log_probs
    assert drift is not None
    assert drift.mean_difference > 0
    both = compare_log_probs(model, of_bf16, engine=castwise.policies.bf16)
    assert both.drift is not None
    drift = both.drift["engine"].summary.log_probs
    assert drift is not None
    assert (drift.kl_k1, drift.kl_k3) == pytest.approx((both.summary.kl_k1, both.summary.kl_k3), rel=1e-3)
    assert drift.kl_k1 != 0
    other = compare_log_probs(model, [moved(record, *[0.3] * 11) for record in of_bf16], engine=castwise.policies.bf16)
    assert other.precision is not None
    assert other.precision.share < 0.2
    assert other.precision.left == pytest.approx(0.3, rel=0.2)
    assert "left for the engine" in str(other)
    assert "<table" in other._repr_html_()
    of_fp32 = [{"tokens": row, "log_probs": log_probs(model, row)} for row in sequences]
    wrong = compare_log_probs(model, of_fp32, engine=castwise.policies.bf16)
    assert "they were not made in this precision" in str(wrong)
    assert "explains" not in str(wrong)


def test_the_trainers_own_precision_is_that_of_the_policy_or_of_the_callers_region(model: Experts) -> None:
    row = torch.randint(CLASSES, (12,)).tolist()
    record = {"tokens": row, "log_probs": log_probs(model, row, torch.bfloat16)}
    assert compare_log_probs(model, [record]).summary.largest_difference > 0
    assert compare_log_probs(model, [record], policy=castwise.policies.bf16).summary.largest_difference == 0
    with castwise.autocast("cpu", dtype=torch.bfloat16):
        assert compare_log_probs(model, [record]).summary.largest_difference == 0


def test_other_likeliest_tokens_and_other_experts_are_counted(model: Experts) -> None:
    row = torch.randint(CLASSES, (9,)).tolist()
    with torch.inference_mode():
        best = model(torch.tensor([row]))["logits"][0].argmax(-1).tolist()
        chosen = model.router(model.embed(torch.tensor(row))).topk(2).indices.tolist()
    top: list[dict[int, float]] = [{}, *({best[place]: -0.1, (best[place] + 1) % CLASSES: -3.0} for place in range(8))]
    top[3] = {(best[2] + 1) % CLASSES: -0.1}
    chosen[5] = [expert for expert in range(4) if expert not in chosen[5]]
    chosen[0] = []
    record = TokenRecord(row, log_probs(model, row), top, {"router": [choice[::-1] for choice in chosen]})
    found = compare_log_probs(model, [record])
    assert found.best_differs == pytest.approx(1 / 8)
    assert found.experts == {"router": pytest.approx(1 / 7)}, "the last token is no input"
    assert "other experts" in str(found)
    assert not model.router._forward_hooks


class BiasedRouter(nn.Linear):
    """As in DeepSeek-V3: a bias has a part in the choice of experts, and none in the scores."""

    returns: Any

    def forward(self, hidden: Tensor) -> Any:
        scores = super().forward(hidden)
        ids = (scores + torch.tensor([9.0, 9.0, 0.0, 0.0])).topk(2).indices
        return self.returns(scores, scores.gather(-1, ids), ids)


@pytest.mark.parametrize(
    "returns",
    [
        lambda scores, weights, ids: (scores, weights, ids),
        lambda scores, weights, ids: (weights, ids),
        lambda scores, weights, ids: (ids, weights),
        lambda scores, weights, ids: (scores, nn.functional.one_hot(ids).sum(-2), ids.flatten(0, -2)),
    ],
)
def test_experts_are_those_that_the_router_chose_where_it_returns_them(model: Experts, returns: Any) -> None:
    model.router, model.forward = BiasedRouter(8, 4), lambda tokens: plain(tokens)  # type: ignore[method-assign]
    model.router.returns = returns

    def plain(tokens: Tensor) -> dict[str, Tensor]:
        hidden = model.embed(tokens)
        model.router(hidden)
        return {"logits": model.head(hidden)}

    record = {"tokens": [3, 1, 4, 1], "log_probs": log_probs(model, [3, 1, 4, 1])}
    experts = {"router": [[0, 1], [1, 0], [0, 3], []]}
    assert compare_log_probs(model, [record | {"experts": experts}]).experts == {"router": pytest.approx(1 / 3)}


def test_scores_that_a_bias_changes_before_experts_are_chosen_are_refused(model: Experts) -> None:
    model.register_buffer("e_score_correction_bias", torch.zeros(4))
    record = {"tokens": [3, 1], "log_probs": log_probs(model, [3, 1])}
    assert compare_log_probs(model, [record]).experts == {}
    message = "'router' returns scores alone, to which the model adds e_score_correction_bias before it chooses"
    with pytest.raises(ValueError, match=message):
        compare_log_probs(model, [record | {"experts": {"router": [[0, 1], []]}}])
    assert not model.router._forward_hooks


def test_files_frames_and_lists_are_the_same(model: Experts, tmp_path: Path) -> None:
    rows = torch.randint(CLASSES, (3, 6)).tolist()
    records = [{"tokens": row, "log_probs": log_probs(model, row)} for row in rows]
    file = tmp_path / "rollout.jsonl"
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    assert read_records(file) == read_records(records) == read_records(map(TokenRecord, rows, read_log_probs(records)))
    compressed = tmp_path / "rollout.jsonl.gz"
    compressed.write_bytes(gzip.compress(file.read_bytes()))
    assert read_records(compressed) == read_records(records)
    for content in (file.read_bytes(), compressed.read_bytes()[:-20]):
        compressed.write_bytes(content)
        with pytest.raises(ValueError, match=r"rollout\.jsonl\.gz is not a complete gzip file"):
            read_records(compressed)
    flat = [
        {"sequence": f"request-{number}", "token": token, "log_prob": value}
        for number, record in enumerate(records)
        for token, value in zip(record["tokens"], record["log_probs"], strict=True)
    ]
    assert read_records(pandas.DataFrame(flat)) == read_records(records)


def test_frames_have_likeliest_tokens_and_experts_as_they_come_out_of_files() -> None:
    """Mappings, pairs as of a map column, mappings with None as of a struct column, and nothing."""
    row = {"sequence": "a", "token": 3, "log_prob": None, "top": None, "experts": {"gate": numpy.array([1, 0])}}
    rows = [
        row,
        row | {"token": 1, "log_prob": -1.0, "top": {"1": -1.0, "7": None}},
        row | {"token": 4, "log_prob": -2.0, "top": [(2, -0.5), (4, -2.0)], "experts": [("gate", [0, 3])]},
        row | {"token": 1, "log_prob": -3.0, "top": math.nan, "experts": math.nan},
    ]
    (record,) = read_records(pandas.DataFrame(rows))
    assert record.top == ({}, {1: -1.0}, {2: -0.5, 4: -2.0}, {})
    assert record.experts == {"gate": [[1, 0], [1, 0], [0, 3], []]}
    with pytest.raises(ValueError, match=r"sequence 'b' of the data frame: the first token has no tokens before it"):
        read_records(pandas.DataFrame([{"sequence": "b", "token": 1, "log_prob": -1.0}]))


def test_frames_may_have_dtypes_with_missing_values() -> None:
    frame = pandas.DataFrame({"sequence": ["a", "a"], "token": [3.0, 1.0], "log_prob": [None, -1.5]})
    expected = [TokenRecord([3, 1], [None, -1.5])]
    assert read_records(frame) == read_records(frame.convert_dtypes()) == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sequence": ["a", None]}, "no sequence in the row 1$"),
        ({"sequence": [math.nan, 2.0]}, "no sequence in the row 0$"),
        ({"token": [3.7, 1.0]}, r"sequence 'a' of the data frame: tokens must be a list of integer ids, got 3\.7$"),
        ({"token": [3, None]}, "sequence 'a' of the data frame: tokens must be a list of integer ids, got None$"),
    ],
)
def test_rows_of_frames_without_a_sequence_or_an_integer_token_are_refused(changed: Any, message: str) -> None:
    columns = {"sequence": ["a", "a"], "token": [3, 1], "log_prob": [None, -1.5]}
    with pytest.raises((TypeError, ValueError), match=message):
        read_records(pandas.DataFrame(columns | changed))


def test_experts_of_frames_are_read_in_time_that_grows_with_the_tokens() -> None:
    class Name(str):
        hashed = 0

        def __hash__(self) -> int:
            Name.hashed += 1
            return super().__hash__()

    name, tokens = Name("gate"), 100
    row = {"sequence": 0, "token": 1, "log_prob": -1.0, "experts": [(name, [0, 1])]}
    (record,) = read_records(pandas.DataFrame([row | {"log_prob": None}, *[row] * (tokens - 1)]))
    assert record.experts == {"gate": [[0, 1]] * tokens}
    assert Name.hashed < 10 * tokens


def test_arrays_and_tensors_are_lists() -> None:
    expected = TokenRecord([3, 1, 4], [None, -1.5, -0.5], experts={"gate": [[0, 1], [2, 1], [1, 3]]})
    tokens, values = numpy.array([3, 1, 4], numpy.int32), numpy.array([math.nan, -1.5, -0.5], numpy.float32)
    experts = numpy.array([[0, 1], [2, 1], [1, 3]], numpy.int16)
    for convert in (numpy.asarray, torch.tensor):
        row = {"tokens": convert(tokens), "log_probs": convert(values), "experts": {"gate": convert(experts)}}
        assert read_records([row]) == [expected]
        scalars = {"tokens": list(row["tokens"]), "log_probs": [None, *row["log_probs"][1:]]}
        assert read_records([scalars]) == [TokenRecord([3, 1, 4], [None, -1.5, -0.5])]


def read_log_probs(records: list[dict[str, Any]]) -> list[list[float | None]]:
    return [record["log_probs"] for record in records]


def test_outputs_of_vllm_objects_and_json() -> None:
    """The documented form: `LLM.generate`'s RequestOutput, whose log-probabilities are objects by token id."""

    def at(**values: float) -> dict[int, Any]:
        ranks = {value: rank for rank, value in enumerate(sorted(values.values(), reverse=True), 1)}
        return {
            int(name[1:]): SimpleNamespace(logprob=value, rank=ranks[value], decoded_token="x")
            for name, value in values.items()
        }

    completion = SimpleNamespace(token_ids=[7, 9], logprobs=[at(_7=-0.5, _2=-1.5), at(_9=-2.0, _4=-0.25)])
    output = SimpleNamespace(
        prompt_token_ids=[1, 2, 3], prompt_logprobs=[None, at(_2=-1.0), at(_3=-3.0)], outputs=[completion]
    )
    (record,) = from_vllm([output])
    assert record.tokens == [1, 2, 3, 7, 9]
    assert record.log_probs == [None, -1.0, -3.0, -0.5, -2.0]
    assert record.top[4] == {9: -2.0, 4: -0.25}
    as_json = {
        "prompt_token_ids": [1, 2, 3],
        "outputs": [{"token_ids": [7], "logprobs": [{"7": {"logprob": -0.5, "rank": 1}}]}],
    }
    assert from_vllm([as_json])[0].log_probs == [None, None, None, -0.5]
    with pytest.raises(ValueError, match=r"SamplingParams\(logprobs=0\)"):
        from_vllm([as_json | {"outputs": [{"token_ids": [7], "logprobs": None}]}])
    with pytest.raises(ValueError, match=r"what LLM\.generate returns"):
        from_vllm(["choices"])
    numbers = {"token_ids": [7], "logprobs": [{7: numpy.float32(-0.5)}]}
    assert from_vllm([as_json | {"outputs": [numbers]}])[0].log_probs[-1] == -0.5


def test_without_the_likeliest_token_vllm_recorded_none() -> None:
    """With `logprobs=0`, there is only the sampled token and its rank."""
    at = [{7: SimpleNamespace(logprob=-0.5, rank=1)}, {9: SimpleNamespace(logprob=-2.0, rank=4)}]
    (record,) = from_vllm(
        [{"prompt_token_ids": [1], "outputs": [SimpleNamespace(token_ids=numpy.array([7, 9]), logprobs=at)]}]
    )
    assert record.log_probs == [None, -0.5, -2.0]
    assert record.top == [{}, {7: -0.5}, {}]


def as_attributes(value: Any) -> Any:
    """As clients have responses: objects, but for the mapping of the likeliest tokens."""
    if isinstance(value, list):
        return [as_attributes(item) for item in value]
    if isinstance(value, dict) and not any(name.isdigit() for name in value):
        return SimpleNamespace(**{name: as_attributes(item) for name, item in value.items()})
    return value


EXPERTS = numpy.arange(4 * 3 * 2).reshape(4, 3, 2) % 4  # of 4 tokens, 3 layers and 2 experts per token


@pytest.mark.parametrize(
    ("of_prompt", "of_completion", "known"),
    [
        (None, EXPERTS[:3], [0, 1, 2]),  # the whole sequence without its last token
        (EXPERTS[:2].tolist(), EXPERTS[2:].tolist(), [0, 1, 2, 3]),
        (EXPERTS[:2], EXPERTS[2:3], [0, 1, 2]),
        (None, EXPERTS[2:], [2, 3]),  # what was generated
        (numpy.where(numpy.arange(2)[:, None, None] == 0, -1, EXPERTS[:2]), EXPERTS[2:], [1, 2, 3]),  # one was cached
    ],
)
def test_experts_of_vllm(of_prompt: Any, of_completion: Any, known: list[int]) -> None:
    output = {
        "prompt_token_ids": [1, 2],
        "prompt_routed_experts": of_prompt,
        "outputs": [{"token_ids": [3, 4], "logprobs": [{3: -1.0}, {4: -1.0}], "routed_experts": of_completion}],
    }
    (record,) = from_vllm([output], routers=[None, "gate", "other"])
    for layer, name in ((1, "gate"), (2, "other")):
        assert record.experts[name] == [EXPERTS[at, layer].tolist() if at in known else [] for at in range(4)]
    with pytest.raises(ValueError, match="experts are those of 3 layers, but routers names 1"):
        from_vllm([output], routers=["gate"])
    with pytest.warns(UserWarning, match=r"left out: name the model's routers with routers=\[\.\.\.\]"):
        assert from_vllm([output])[0].experts == {}


def as_npy(experts: Any) -> str:
    file = io.BytesIO()
    numpy.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("first", [0, 1, 2])  # `routed_experts_prompt_start`
@pytest.mark.parametrize("wrap", [lambda response: response, as_attributes], ids=["json", "client"])
def test_responses_of_the_server_of_vllm(wrap: Any, first: int) -> None:
    """As documented of `/v1/completions`: `.npy` in base64, without the last token."""
    choice = {
        "text": "a b",
        "prompt_token_ids": [1, 2],
        "token_ids": [3, 4],
        "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0], "top_logprobs": None},
        "routed_experts": as_npy(EXPERTS[first:3].astype(numpy.uint8)),
    }
    (record,) = from_vllm([wrap({"id": "cmpl-1", "choices": [choice]})], routers=[None, "gate", None])
    assert (record.tokens, record.log_probs) == ([1, 2, 3, 4], [None, None, -1.0, -2.0])
    assert record.experts == {"gate": [EXPERTS[at, 1].tolist() if first <= at < 3 else [] for at in range(4)]}
    of_chat = {"content": [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0}]}
    chat = {"prompt_token_ids": [1, 2], "choices": [choice | {"prompt_token_ids": None, "logprobs": of_chat}]}
    chat["prompt_logprobs"] = [None, {"2": {"logprob": -0.5}}]
    (record,) = from_vllm([wrap(chat)], routers=[None, "gate", None])
    assert (record.tokens, record.log_probs) == ([1, 2, 3, 4], [None, -0.5, -1.0, -2.0])
    assert len(record.experts["gate"]) == 4
    for missing in ("token_ids", "prompt_token_ids", "logprobs"):
        with pytest.raises(ValueError, match="return_token_ids=True and logprobs"):
            from_vllm([wrap({"choices": [choice | {missing: None}]})])


def test_responses_of_sglang() -> None:
    response = {"text": "a b", "meta_info": {"output_token_logprobs": [[-0.5, 7, None], [-2.0, 9, "b"]]}}
    (record,) = from_sglang([response], [[1, 2]])
    assert (record.tokens, record.log_probs, record.top) == ([1, 2, 7, 9], [None, None, -0.5, -2.0], ())
    with pytest.raises(ValueError, match="return_logprob=True"):
        from_sglang([{"text": "a b", "meta_info": {}}], [[1]])


def test_responses_of_sglang_with_all_that_can_be_requested() -> None:
    """`logprob_start_len=1`, `top_logprobs_num=2` and `return_routed_experts=True`."""
    meta = {
        "input_token_logprobs": [[None, 2, None], [-1.0, 5, None]],
        "input_top_logprobs": [None, [[-0.25, 8, None], [-1.0, 5, None]]],
        "output_token_logprobs": [[-0.5, 7, None]],
        "output_top_logprobs": [[[-0.5, 7, None], [-1.5, 3, None]]],
        "routed_experts": base64.b64encode(EXPERTS[:3].astype(numpy.int32).tobytes()).decode(),
    }
    (record,) = from_sglang([{"meta_info": meta}], [torch.tensor([1, 2, 5])], routers=["gate", None, "other"])
    assert (record.tokens, record.log_probs) == ([1, 2, 5, 7], [None, None, -1.0, -0.5])
    assert record.top == [{}, {}, {8: -0.25, 5: -1.0}, {7: -0.5, 3: -1.5}]
    assert record.experts == {
        "gate": [*EXPERTS[:3, 0].tolist(), []],
        "other": [*EXPERTS[:3, 2].tolist(), []],
    }
    with pytest.raises(ValueError, match=r"has 18 numbers, .* not a multiple of 3 tokens by 4 routers"):
        from_sglang([{"meta_info": meta}], [[1, 2, 5]], routers=["a", "b", "c", "d"])
    with pytest.raises(ValueError, match="the last tokens of the prompt"):
        from_sglang([{"meta_info": meta}], [[1, 2, 6]])


def test_outputs_of_transformers(model: Experts) -> None:
    prompt = torch.randint(CLASSES, (2, 3))
    sequences, logits = prompt, []
    with torch.inference_mode():
        for _ in range(4):
            logits.append(model(sequences)["logits"][:, -1])
            sequences = torch.cat([sequences, logits[-1].argmax(-1, keepdim=True)], 1)
    output = SimpleNamespace(sequences=sequences, logits=tuple(logits))
    records = from_transformers(output, prompt_length=3)
    found = compare_log_probs(model, records)
    assert found.summary.tokens == 8
    assert found.summary.largest_difference < 1e-5
    end = sequences[0, 4].item()  # what follows its first occurrence is padding
    lengths = [len(record.tokens) for record in from_transformers(output, 3, eos_token_id=[end])]
    assert lengths == [3 + (row.index(end) + 1 if end in row else 4) for row in sequences[:, 3:].tolist()]
    assert lengths[0] <= 5
    with pytest.raises(ValueError, match="5 tokens after a prompt of 2, but there are 4 logits"):
        from_transformers(output, prompt_length=2)
    beams = SimpleNamespace(**vars(output), beam_indices=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="the output is that of beam search"):
        from_transformers(beams, 3)
    with pytest.raises(ValueError, match="output_logits=True"):
        from_transformers(SimpleNamespace(sequences=sequences, logits=None), 3)


RECORD = {"tokens": [1, 2], "log_probs": [None, -1.0]}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [{"tokens": [1, 2]}],
            r"records\[0\] must be a mapping with \"tokens\" and \"log_probs\".*the keys \['tokens'\]",
        ),
        ([RECORD, 3], r"records\[1\] must be a mapping.*got int"),
        ([RECORD | {"log_probs": [None]}], r"records\[0\]: log_probs must have an entry for each of 2 tokens, got 1"),
        ([RECORD | {"log_probs": [-1.0, -1.0]}], "the first token has no tokens before it"),
        ([RECORD | {"log_probs": [None, None]}], "at least one log-probability"),
        ([RECORD | {"tokens": [1.5, 2]}], "integer ids"),
        ([RECORD | {"tokens": [1, -2]}], r"records\[0\]: tokens must be ids >= 0, got -2$"),
        ([RECORD | {"log_probs": [None, "a"]}], "list of numbers"),
        ([RECORD | {"log_probs": [None, math.nan]}], r"records\[0\]: log_probs\[1\] must be the finite log.*got nan$"),
        ([RECORD | {"log_probs": [None, -math.inf]}], "got -inf: record them before top_k and top_p exclude tokens"),
        ([RECORD | {"log_probs": [None, -9999.0]}], r"got -9999\.0: record them before top_k and top_p exclude tokens"),
        ([RECORD | {"log_probs": [None, 0.5]}], r"so at most 0, or None, got 0\.5$"),
        ([RECORD | {"tokens": [1, 99]}], r"records\[0\]: the model must return logits .*the largest is 99"),
        ([RECORD | {"experts": {"gate": [[0], [1]]}}], "a router 'gate', which is no module"),
        ([RECORD | {"experts": {"router": [[9], None]}}], r"the expert 9 of 'router', which scores 4 experts"),
        ([RECORD | {"experts": {"router": [1, 2]}}], r"an entry of experts\['router'\] must be a list, got 1"),
        ([RECORD | {"experts": [[0], [1]]}], "experts must be a mapping by the names of routers, got list"),
        ([RECORD | {"top": [{}, {99: -1.0}]}], r"records\[0\]: top has the token 99, which is none of .* 16 classes"),
        ([RECORD | {"top": [{}, {-1: -1.0}]}], r"records\[0\]: top must have ids >= 0, got -1"),
        (
            [RECORD | {"top": [{}, {"a": -1.0}]}],
            "an entry of top must map token ids to log-probabilities, got {'a': -1",
        ),
        (3, "records must be a file of JSON lines"),
    ],
)
def test_what_is_no_record_is_refused(model: Experts, records: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        compare_log_probs(model, records)


def test_models_in_training_and_lines_that_are_no_json_are_refused(model: Experts, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"tokens"\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:1 is not JSON"):
        compare_log_probs(model, tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(RECORD)}\n\n[1, 2]\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:3 must be a mapping .* got list"):
        compare_log_probs(model, tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match=r"x\.jsonl is not UTF-8 text"):
        compare_log_probs(model, tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        compare_log_probs(model.train(), [RECORD])


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda: from_vllm(None), r"outputs must be a list of what LLM\.generate or .*, got NoneType"),  # type: ignore[arg-type]
        (lambda: from_vllm({"choices": []}), "outputs must be a list .* got dict"),
        (lambda: from_sglang({"meta_info": {}}, [[1]]), "responses must be a list .* got dict"),  # type: ignore[arg-type]
        (lambda: from_sglang([{}], []), "the token ids of each of 1 responses, got 0"),
        (lambda: from_transformers(torch.zeros(1, 2), 1), "generate with return_dict_in_generate=True"),
        (
            lambda: from_vllm([{"prompt_token_ids": [1], "outputs": [{"token_ids": [2], "logprobs": []}]}]),
            "log-probabilities must be of each of 2 tokens, got 1",
        ),
    ],
)
def test_what_no_engine_returns_is_refused(convert: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        convert()


def test_options_out_of_range_are_refused_before_the_model_runs(model: Experts) -> None:
    with pytest.raises(ValueError, match="0 <= low < high"):
        compare_log_probs(model, [RECORD], clip_band=(1.2, 0.8))
    with pytest.raises(TypeError, match=r"engine must be a policy, such as castwise\.policies\.bf16, got 'bf16'"):
        compare_log_probs(model, [RECORD], engine="bf16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"records\[0\]: the model cannot look up 2 tokens from 1 to 16"):
        compare_log_probs(model, [{"tokens": [16, 1, 2], "log_probs": [None, -1.0, -1.0]}])
    with pytest.raises(ValueError, match="worst must be an integer >= 1, got 0"):
        compare_log_probs(model, [RECORD], worst=0)


def test_of_a_difference_that_is_not_a_number_nothing_is_explained() -> None:
    assert math.isnan(PrecisionShare(recorded=math.nan, precision=0.1).share)
    assert PrecisionShare(recorded=0.2, precision=0.1).share == pytest.approx(0.25)
    assert PrecisionShare(recorded=0.1, precision=0.2).share == 1.0


def test_nothing_of_the_model_changes(model: Experts) -> None:
    before, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    row = torch.randint(CLASSES, (6,), generator=torch.Generator().manual_seed(0)).tolist()
    record = {"tokens": row, "log_probs": log_probs(model, row)}
    found: RecordedDrift = compare_log_probs(model, [record], engine=castwise.policies.bf16)
    assert math.isfinite(found.summary.kl_k3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(param.grad is None for param in model.parameters())


def test_a_sequence_of_one_token_has_nothing_to_compare(model: Experts) -> None:
    lone = {"tokens": [1], "log_probs": [None]}
    assert str(compare_log_probs(model, [RECORD, lone])) == str(compare_log_probs(model, [RECORD]))
