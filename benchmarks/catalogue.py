"""The benchmarks of `python -m benchmarks`, in the order in which they run and appear on the page."""

from __future__ import annotations

from typing import Any

from benchmarks import (
    autocast_overhead,
    comparison_cost,
    growth,
    master_weights,
    monitor_cost,
    policy_overhead,
    scale_out,
    small_steps,
    step_cost,
    training,
    weight_cache,
)
from benchmarks.benchmark import Benchmark

BENCHMARKS: tuple[Benchmark[Any], ...] = (
    training.BENCHMARK,
    step_cost.BENCHMARK,
    small_steps.BENCHMARK,
    growth.BENCHMARK,
    autocast_overhead.BENCHMARK,
    policy_overhead.BENCHMARK,
    weight_cache.BENCHMARK,
    master_weights.BENCHMARK,
    monitor_cost.BENCHMARK,
    comparison_cost.BENCHMARK,
    scale_out.BENCHMARK,
)
