"""Measured speeds of matrix products."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from castwise._doctor import native_formats as formats
from castwise._doctor import speed as speeds
from castwise._doctor.speed import SMALLEST, Quartiles, Speed, Verdict, measure

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    """A second one that waits for a busy neighbour is what would be measured."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def speed(low: float, high: float) -> Speed:
    return Speed(256, Quartiles(1.0, 1.0, 1.0), Quartiles(low, math.sqrt(low * high), high))


def test_a_speed_is_operations_by_seconds() -> None:
    found = measure(CPU, ["fp32"], budget_s=0.5)["fp32"]
    assert isinstance(found, Speed)
    assert found.times_fp32 == Quartiles(1.0, 1.0, 1.0)
    a = torch.randn(found.size, found.size)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    fastest = 2 * found.size**3 / min(seconds) / 1e9
    assert found.gflops.low <= found.gflops.median <= found.gflops.high < 3 * fastest
    assert found.gflops.high > fastest / 20  # a busy machine has that much


def test_an_emulated_format_is_measured_beside_fp32_and_holds_no_other_up(monkeypatch: pytest.MonkeyPatch) -> None:
    per_product = {"fp32": 1e-11, "fp16": 1e-9}
    monkeypatch.setattr(speeds, "_warm", lambda _, name, size: lambda: per_product[name] * size**3)
    found = measure(CPU, ["fp32", "fp16"], budget_s=2.0)
    fp32, fp16 = found["fp32"], found["fp16"]
    assert isinstance(fp32, Speed)
    assert isinstance(fp16, Speed)
    assert list(found) == ["fp32", "fp16"]
    assert fp16.times_fp32.median == pytest.approx(0.01)
    assert SMALLEST <= fp16.size < fp32.size


def test_fp8_is_multiplied_by_the_kernel_for_it() -> None:
    found = measure(CPU, ["fp32", "fp8"], budget_s=0.2)["fp8"]
    assert isinstance(found, Speed)
    assert found.gflops.median > 0


def test_a_format_without_kernels_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(formats.DTYPES, "qint8", torch.qint8)
    found = measure(CPU, ["fp32", "qint8"], budget_s=0.1)
    assert isinstance(found["fp32"], Speed)
    assert isinstance(found["qint8"], str)
    assert "quantized" in found["qint8"]
    assert "\n" not in found["qint8"]
    monkeypatch.setitem(formats.DTYPES, "fp32", torch.qint8)
    without = measure(CPU, ["fp32", "bf16"], budget_s=0.1)
    assert without["bf16"] == "no fp32 result to compare with"
    assert without["fp32"] == found["qint8"]


def test_the_budget_is_kept() -> None:
    start = time.process_time()  # of this process alone: a busy neighbour does not count
    measure(CPU, ["fp32"], budget_s=0.3)
    assert time.process_time() - start < 2


def test_the_precision_of_fp32_products_is_left_as_it_was() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        measure(CPU, ["fp32"], budget_s=0.05)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.1, 1.2, "faster"),
        (1.2, 30.0, "faster"),
        (0.1, 0.9, "slower"),
        (0.95, 1.05, "as fast"),
        (1.0, 1.4, "as fast"),
        (0.9, 1.4, "too noisy to tell"),
        (0.5, 2.0, "too noisy to tell"),
    ],
)
def test_a_verdict_needs_three_turns_of_four(low: float, high: float, verdict: Verdict) -> None:
    assert speed(low, high).verdict == verdict


def test_quartiles_are_numpys() -> None:
    values = [float(value) for value in np.random.default_rng(0).lognormal(size=11)]
    found = Quartiles.of(values)
    assert [found.low, found.median, found.high] == pytest.approx(np.percentile(values, [25, 50, 75]))


@pytest.mark.gpu
def test_a_gpus_tensor_cores_are_faster_and_tf32_is_no_more_than_fp32_when_off() -> None:
    gpu = torch.device("cuda", 0)
    found = measure(gpu, formats.to_try(formats.of_device(gpu)), budget_s=2.0)
    for name, native in formats.of_device(gpu).items():
        if native and name != "fp32":
            of_units = found[name]
            assert isinstance(of_units, Speed), (name, of_units)
            assert of_units.verdict == "faster", name
