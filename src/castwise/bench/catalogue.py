"""All benchmarks, in the order in which they run and appear on the page."""

from __future__ import annotations

from typing import Any

from castwise.bench import (
    autocast_overhead,
    comparison_cost,
    growth,
    host_time,
    imports,
    master_weights,
    monitor_cost,
    policy_overhead,
    scale_out,
    small_steps,
    step_cost,
    tensor_growth,
    training,
    weight_cache,
)
from castwise.bench.benchmark import Benchmark

BENCHMARKS: tuple[Benchmark[Any], ...] = (
    training.BENCHMARK,
    step_cost.BENCHMARK,
    small_steps.BENCHMARK,
    growth.BENCHMARK,
    tensor_growth.BENCHMARK,
    host_time.BENCHMARK,
    autocast_overhead.BENCHMARK,
    policy_overhead.BENCHMARK,
    weight_cache.BENCHMARK,
    master_weights.BENCHMARK,
    monitor_cost.BENCHMARK,
    comparison_cost.BENCHMARK,
    scale_out.BENCHMARK,
    imports.BENCHMARK,
)
