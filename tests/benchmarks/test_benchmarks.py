"""Each benchmark runs, on as little as it can, and says something of both rivals."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from benchmarks.benchmark import Benchmark, Record
from benchmarks.catalogue import BENCHMARKS
from benchmarks.pairing import CASTWISE, Rounds
from benchmarks.recording import verdicts
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import castwise
from benchmarks import (
    autocast_overhead,
    comparison_cost,
    growth,
    machine,
    master_weights,
    monitor_cost,
    policy_overhead,
    scale_out,
    small_steps,
    step_cost,
    training,
    weight_cache,
)
from castwise._demo.corpus import Corpus
from castwise._demo.gpt import GPT, Size

pytestmark = pytest.mark.usefixtures("warm_python")

TWICE = Rounds(2)
TINY = Size(layers=1, heads=1, width=8, context=8, batch=2)
WORDS = {"faster", "slower", "as fast", "cannot tell"}


def run(benchmark: Benchmark[Any], plan: object) -> tuple[Record, list[str]]:
    """Return the record as JSON gives it back, and the rows of all tables as text."""
    record: Record = json.loads(json.dumps(benchmark.measure("cpu", plan)))
    tables = benchmark.tables(record)
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert set(verdicts(record)) <= WORDS
    return record, [" | ".join(row) for table in tables for row in table.rows]


def is_time(value: float) -> bool:
    return math.isfinite(value) and value > 0


# Calls that belong to one library; torch's come twice in a round, as itself and as its own null.
CALLS = {
    "torch": [(torch.amp.GradScaler, "update"), (ShardedGradScaler, "update"), (torch.autocast, "__enter__")],
    "castwise": [(castwise.GradScaler, "update"), (castwise.autocast, "__enter__")],
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often either library's scalers and regions were called."""
    counted: Counter[str] = Counter()

    def count(library: str, owner: type, name: str) -> None:
        original = owner.__dict__[name]

        def counting(*args: object, **kwargs: object) -> object:
            counted[library] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for library, of_library in CALLS.items():
        for owner, name in of_library:
            count(library, owner, name)
    return counted


def test_ways_to_step_are_those_of_the_library_in_their_name(calls: Counter[str]) -> None:
    case = step_cost.Case([(8, 8)], "fused AdamW", "cpu")
    for (library, name), way in case.ways().items():
        case.refill()
        calls.clear()
        way()
        by = "castwise" if library == CASTWISE else "torch"
        assert calls == ({} if name in (step_cost.BARE, step_cost.CLIPPED) else {by: 1}), (library, name)


@pytest.mark.parametrize("library", small_steps.LIBRARIES)
def test_iterations_and_regions_are_those_of_the_library_in_their_name(library: str, calls: Counter[str]) -> None:
    for step in small_steps.STEPS:
        small_steps.iteration(library, "SGD fused", step, "2 of 16", "cpu")()
    for call, _ in autocast_overhead.cases(autocast_overhead.LIBRARIES[library], "cpu").values():
        call()
    assert calls == {"castwise" if library == CASTWISE else "torch": 3 + 6}


def test_policies_are_castwise_s_and_the_rest_is_torch_s(calls: Counter[str]) -> None:
    for name, call in policy_overhead.cases("cpu").items():
        calls.clear()
        call()
        assert set(calls) == {"castwise" if name.startswith("policy") else "torch"}, name


def test_trainings_and_weight_caches_are_raced_against_torch_twice(calls: Counter[str]) -> None:
    blocks, x = weight_cache.mlp(8), torch.ones(2, 8)
    weight_cache.race_of(blocks, x, weight_cache.train(1), "cpu", TWICE, trains=True)
    assert calls == {
        "torch": 3 + 2 * 4,
        "castwise": 3 + 4,
    }  # compared; raced, warm-up included
    calls.clear()
    training.race_of(TINY, "bf16", Corpus(bytes(range(256)) * 40, TINY.context), "cpu", TWICE)
    assert calls["castwise"] > 0
    assert calls["torch"] == 3 * calls["castwise"]  # fp32 counts as torch's


@pytest.fixture
def _few_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step_cost.SIZES, "few", [(8, 8)] * 3)


@pytest.mark.usefixtures("_few_tensors")
@pytest.mark.parametrize("optimizer", step_cost.OPTIMIZERS)
def test_step_cost(optimizer: str) -> None:
    record, rows = run(step_cost.BENCHMARK, step_cost.Plan(TWICE, (("few", optimizer),)))
    result = record["results"][f"few, {optimizer}"]
    assert all(
        is_time(result["median_ms"][f"{library} {way}"])
        for library in ("torch", "castwise")
        for way in (step_cost.SCALED, step_cost.BOTH)
    )
    assert result["relative_to_step"]["torch step"]["median"] == 1.0
    traffic = result["gradient_traffic_before_the_optimizer"]
    assert traffic["torch scaled + clipped step + update"]["reads"] == 3.0
    assert traffic["castwise scaled + clipped step + update"]["reads"] == (1.0 if "fused" in optimizer else 2.0)
    assert len(verdicts(record)) == 2
    assert len(rows) == 4


def test_a_step_that_does_not_fit_is_left_out_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda device: 1000)
    record = step_cost.measure("cpu", step_cost.Plan(TWICE, (("10M", "fused SGD"),)))
    reason = "left out: needs 0.1 GiB of memory, 0.0 GiB are free"
    assert record == {"results": {"10M, fused SGD": {"skipped": reason}}}
    assert f"10M, fused SGD: {reason}." in step_cost.tables(record)[0].markdown()


def test_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "PARAMETERS", 6000)
    monkeypatch.setattr(growth, "MILLION", 1000)
    plan = growth.Plan(
        TWICE,
        millions=(1,),
        tensors=(10, 30),
        cache_millions=(3,),
        cache_tensors=(10, 40),
        monitor_millions=(2,),
        monitor_tensors=(20,),
    )
    record, rows = run(growth.BENCHMARK, plan)
    assert [(row["parameters"], row["tensors"]) for row in record["parameters"]] == [(1000, 100)]
    assert [(row["parameters"], row["tensors"]) for row in record["tensors"]] == [(6000, 10), (6000, 30)]
    names = ["3M parameters", "10 tensors", "40 tensors", "2M parameters", "30 tensors"]
    costs = ("weight cache", "weight cache, by tensors", "monitor", "monitor, by tensors")
    assert [name for cost in costs for name in record[cost]] == names
    assert len(verdicts(record)) == 11
    assert [row.split(" | ")[0] for row in rows if not row.startswith(" ")] == ["1,000", "10", "30", *names]


@pytest.mark.parametrize("millions", [1, 500])
def test_models_have_about_as_many_parameters_as_their_tables_say(millions: int) -> None:
    parameters = millions * 1_000_000
    with torch.device("meta"):
        for model in (growth.mlp(parameters), GPT(growth.gpt_size(parameters))):
            assert sum(param.numel() for param in model.parameters()) == pytest.approx(parameters, rel=0.1)


@pytest.mark.parametrize("tensors", [10, 100, 1000])
def test_models_are_in_about_as_many_tensors_as_their_tables_say(tensors: int) -> None:
    size = growth.gpt_size(growth.PARAMETERS, tensors)
    assert tensors <= growth.number_of_tensors(size) <= tensors + 10
    with torch.device("meta"):
        parameters = sum(param.numel() for param in GPT(size).parameters())
    assert growth.PARAMETERS <= parameters <= 1.6 * growth.PARAMETERS
    if tensors <= 100:
        chain = growth.chain(growth.PARAMETERS, tensors)
        assert len(chain) == tensors
        assert sum(param.numel() for param in chain.parameters()) == pytest.approx(growth.PARAMETERS, rel=0.1)
        x = torch.ones(1, chain[0].in_features)
        assert chain(x).norm().item() == pytest.approx(x.norm().item(), rel=1e-3), "nothing fades away"


def test_what_grows_beyond_memory_is_left_out_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_bytes", lambda device: 1000)
    plan = growth.Plan(
        TWICE, (), (), cache_millions=(100,), cache_tensors=(), monitor_millions=(100,), monitor_tensors=()
    )
    record = growth.measure("cpu", plan)
    lines = [line for table in growth.tables(record) for line in table.below.splitlines()]
    assert lines == [
        "100M parameters: left out: needs 1.9 GiB of memory, 0.0 GiB are free.",
        "100M parameters: left out: needs 6.7 GiB of memory, 0.0 GiB are free.",
    ]


def test_small_steps() -> None:
    record, rows = run(small_steps.BENCHMARK, small_steps.Plan(TWICE, sizes=("2 of 16",), repeats=1))
    assert [len(record["iterations"]), len(record["calls"])] == [12, 2]
    assert [len(verdicts(record)), len(rows)] == [14, 14]
    assert all(is_time(row["median_us"]["castwise"]) for row in record["iterations"].values())


def test_autocast_overhead() -> None:
    record, rows = run(autocast_overhead.BENCHMARK, autocast_overhead.Plan(TWICE, repetitions=2))
    assert [len(verdicts(record)), len(record["results"]), len(rows)] == [6, 6, 6]
    for row in record["results"].values():
        assert is_time(row["median_us"]["torch"])
        assert is_time(row["median_us"]["castwise"])


def test_policy_overhead() -> None:
    record, rows = run(policy_overhead.BENCHMARK, policy_overhead.Plan(TWICE))
    assert [name.split(",")[0] for name in record["results"]].count("policy") == 3
    assert [len(verdicts(record)), len(rows)] == [2, 6]


def test_weight_cache() -> None:
    plan = weight_cache.Plan(TWICE, width=8, gpt=TINY, tokens=1, batches=(2,), micro_batches=(2,))
    record, rows = run(weight_cache.BENCHMARK, plan)
    assert list(record["cases"]) == [
        "MLP, inference, batch 2",
        "GPT, 1 tokens decoded",
        "MLP, training, 2 micro-batches of 8",
    ]
    assert [len(verdicts(record)), len(rows)] == [3, 3]
    assert all(row["bytes of copies / of weights"] < 0.51 for row in record["cases"].values())


def test_master_weights() -> None:
    plan = master_weights.Plan(TWICE, blocks=1, width=8, gpt=TINY, optimizers=("fused AdamW",), children=("split",))
    record, rows = run(master_weights.BENCHMARK, plan)
    found = record["bytes per parameter"]
    assert found["fp32 weights"]["sum"] == 18.0
    assert all(found[name]["within the limit"] for name in master_weights.BYTES)
    assert [peak["parameters"] for peak in record["peaks"]["split"].values()] == [872, 872]
    compiled = ["split, compiled", "split, bf16 states, compiled"]
    variants = ["split", compiled[0], "split, bf16 states", compiled[1], "stochastic, bf16 states"]
    assert master_weights.variants_of("foreach AdamW", "cpu") == [each for each in variants if each not in compiled]
    steps, training = record["optimizer steps"]["fused AdamW"], record["training step"]
    assert list(steps["to fp32 weights"]) == variants
    assert list(training["to fp32 weights"]) == ["split", "split, compiled"]
    assert training["same losses as fp32 weights"] == {"split": True, "split, compiled": True}
    assert [len(verdicts(record)), len(rows)] == [7, 11]


@pytest.mark.parametrize(("found", "cell"), [(2.0, "2: met"), (2.1, "2: MISSED")])
def test_a_missed_limit_is_said_to_be(found: float, cell: str) -> None:
    assert master_weights._limit(master_weights.with_limit({"median": found}, "median", 2.0)) == cell


def test_a_cast_is_counted_once_for_each_parameter_that_autocast_copies() -> None:
    layer = torch.nn.Linear(4, 4)
    other = torch.nn.Linear(4, 4)
    with master_weights.CastBytes(list(layer.parameters())) as casts, torch.autocast("cpu", dtype=torch.bfloat16):
        other(layer(layer(torch.ones(2, 4))))
    assert casts.count == 2 * (4 * 4 + 4)


def test_monitor_cost() -> None:
    plan = monitor_cost.Plan(TWICE, precisions=("bf16",), size=TINY)
    record, rows = run(monitor_cost.BENCHMARK, plan)
    (case,) = record["cases"].values()
    assert set(case["seconds"]) == {"alone", "alone again", "not sampled", "sampled"}
    assert case["bytes of a sample"] > 200
    assert [len(verdicts(record)), len(rows)] == [1, 1]


def test_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "is_native_here", lambda dtype: False)
    record, rows = run(training.BENCHMARK, training.Plan(TWICE, sizes={"least": TINY}))
    bf16, fp16 = record["rows"]["least, bf16"], record["rows"]["least, fp16"]
    assert all(is_time(bf16["tokens_per_s"][rival]) for rival in ("fp32", "torch", "castwise"))
    assert bf16["same losses as torch"] is True
    assert fp16["skipped"] == "left out: this CPU has no units for fp16, or torch does not use them"
    assert fp16["skipped"] in training.tables(record)[0].below
    assert [len(verdicts(record)), len(rows)] == [2, 1]
    assert training.why_not("fp16", "cuda") is None


def test_scale_out() -> None:
    record, rows = run(scale_out.BENCHMARK, scale_out.Plan(rounds=2, ranks=(2,)))
    *cases, latency = record["ranks"]["2"]
    assert [(case["split"], case["clip"]) for case in cases] == [
        *(("DDP", False), ("DDP", True)),
        *(("FSDP2", False), ("FSDP2", True)),
    ]
    assert all(case["collectives"]["castwise"] == 1 for case in cases)
    assert [case["collectives"]["torch"] for case in cases] == [1, 1, 2, 3]
    assert is_time(latency["all_reduce of 16 bytes"])
    assert [len(verdicts(record)), len(rows)] == [4, 4]


def test_more_and_wider_layers_are_between_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def on_ranks(*of: int) -> list[Record]:
        asked.append(of)
        return [{scale_out.LATENCY: 1e-6 * of[0]}]

    monkeypatch.setattr(scale_out, "on_ranks", on_ranks)
    record = scale_out.measure("cpu", scale_out.Plan(rounds=7, ranks=(2, 4), layers=(160,), widths=(256,)))
    assert asked == [(2, 16, 7), (4, 16, 7), (2, 160, 7), (2, 16, 7, 256)]
    (table,) = scale_out.tables(record)
    assert table.below == "An all-reduce of 16 bytes alone: 2 us on 2 ranks, 4 us on 4 ranks."


def test_a_rank_that_fails_ends_all_of_them_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_out, "WORKER", "json.tool")
    with pytest.raises(RuntimeError, match=r"(?s)rank \d of 2 failed:\nusage: .*json"):
        scale_out.on_ranks(2, 1, 5)


def test_ranks_that_take_too_long_are_ended() -> None:
    with pytest.raises(RuntimeError, match=r"^2 ranks did not finish within 0 s$"):
        scale_out.on_ranks(2, 1, 5, patience_s=0.2)


def test_names_are_those_of_files() -> None:
    names = [benchmark.name for benchmark in BENCHMARKS]
    assert len(set(names)) == len(names) == 11
    assert all(name.replace("_", "").isalpha() for name in names)


def test_a_comparison_is_timed_and_its_memory_counted() -> None:
    record, rows = run(comparison_cost.BENCHMARK, comparison_cost.Plan(TWICE, TINY))
    assert all(is_time(value) for value in record["seconds"].values())
    assert record["bytes"]["alone"] < record["bytes"]["outputs kept"] <= record["bytes"]["one policy"]
    assert record["tune"]["forwards of a batch"] <= 9 * record["tune"]["modules"]
    assert any(row.startswith("one policy | ") for row in rows)
    assert any(row.startswith("compare, two policies | ") for row in rows)
