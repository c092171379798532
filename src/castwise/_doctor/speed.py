"""How fast a device multiplies matrices in each format.

The benchmark times the three products of a linear layer in a training step, `x @ w.T`, `g @ w` and `g.T @ x`, with
square matrices; in emulated formats their speeds differ by a factor of ten. The formats run in random order within each
round, so that a clock change or a busy neighbour affects all of them. Ratios compare times of the same round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from castwise._doctor.native_formats import DTYPES

SMALLEST, LARGEST = 128, 4096
ROUNDS, FEWEST_ROUNDS = 11, 3
# Emulated formats run apart: they would limit the others to a size at which these do not reach full speed.
_SLOW_FROM = 4.0
_NOISY_FROM = 1.5
GAIN = 1.1  # a smaller gain does not justify lower precision

Progress = Callable[[str, int, int], object]
"""A callback that receives the current activity, the number of finished parts, and the total."""
Verdict = Literal["faster", "as fast", "slower", "too noisy to tell"]


@dataclass(frozen=True)
class Quartiles:
    """First quartile, median and third quartile of measured values."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Quartiles:
        """Return the quartiles of two values or more.

        Example:
            >>> Quartiles.of([1.0, 2.0, 3.0, 4.0, 9.0])
            Quartiles(low=2.0, median=3.0, high=4.0)
        """
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Speed:
    """Speed of matrix products in a format.

    Attributes:
        size: Rows and columns of the matrices.
        gflops: 10^9 multiplications and additions per second.
        times_fp32: Speed relative to fp32 in the same round; above 1 is faster.
    """

    size: int
    gflops: Quartiles
    times_fp32: Quartiles

    @property
    def verdict(self) -> Verdict:
        """The verdict that three of four rounds agree on."""
        low, high = self.times_fp32.low, self.times_fp32.high
        if low >= GAIN:
            return "faster"
        if high <= 1 / GAIN:
            return "slower"
        return "too noisy to tell" if high > _NOISY_FROM * low else "as fast"


def measure(
    device: torch.device, formats: list[str], budget_s: float, progress: Progress = lambda *_: None
) -> dict[str, Speed | str]:
    """Measure the speed of matrix products.

    Args:
        device: The device to measure.
        formats: Names in `castwise._doctor.native_formats.DTYPES`, including fp32.
        budget_s: Approximate time limit in seconds; emulated formats on slow machines take somewhat longer.
        progress: Called before each round.

    Returns:
        For each format its speed, or the reason why it was not measured.

    Example:
        >>> speeds = measure(torch.device("cpu"), ["fp32", "bf16"], budget_s=0.1)
        >>> speeds["fp32"].times_fp32.median
        1.0
    """
    results: dict[str, Speed | str] = {}
    seconds: dict[str, float] = {}
    for name in formats:
        try:
            seconds[name] = _warm(device, name, SMALLEST)()
        except (RuntimeError, TypeError) as error:  # no kernel for the format, or out of memory
            results[name] = str(error).partition("\n")[0]
    if "fp32" not in seconds:
        return {**dict.fromkeys(formats, "no fp32 result to compare with"), **results}
    slow = [name for name in seconds if seconds[name] > _SLOW_FROM * seconds["fp32"]]
    fast = [name for name in seconds if name not in slow]
    races = [race for race in (["fp32", *slow] if slow else [], fast) if race]
    for race in races:  # the fast formats last: fp32's own speed comes from their race
        results |= _race(device, race, budget_s / len(races), progress)
    return {name: results[name] for name in formats}


def _race(device: torch.device, formats: list[str], budget_s: float, progress: Progress) -> dict[str, Speed]:
    size = SMALLEST
    while True:
        runs = {name: _warm(device, name, size) for name in formats}
        a_round = min(sum(run() for run in runs.values()) for _ in range(2))  # one of them may have been delayed
        if size == LARGEST or 8 * a_round * (ROUNDS + 2) > budget_s:
            break
        size *= 2
    give_up = time.perf_counter() + budget_s
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in formats}
    for turn in range(ROUNDS):
        if turn >= FEWEST_ROUNDS and time.perf_counter() > give_up:
            break
        progress(f"{device}: {', '.join(formats)}, {size} x {size}", turn, ROUNDS)
        for name in order.sample(formats, len(formats)):
            seconds[name].append(runs[name]())
    operations = 3 * 2 * size**3
    return {
        name: Speed(
            size,
            Quartiles.of([operations / taken / 1e9 for taken in seconds[name]]),
            Quartiles.of([fp32 / taken for fp32, taken in zip(seconds["fp32"], seconds[name], strict=True)]),
        )
        for name in formats
    }


def _warm(device: torch.device, name: str, size: int) -> Callable[[], float]:
    """Load the kernels and return a function that runs the products once and returns the seconds."""
    products = _products(device, DTYPES[name], size)

    def seconds() -> float:
        with _fp32_matmuls_as("high" if name == "tf32" else "highest"):
            _wait_for(device)
            start = time.perf_counter()
            products()
            _wait_for(device)
            return time.perf_counter() - start

    seconds()
    return seconds


def _products(device: torch.device, dtype: torch.dtype, size: int) -> Callable[[], None]:
    x, w, g = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))

    def linear() -> None:
        x @ w.t()
        g @ w
        g.t() @ x

    def scaled() -> None:
        for left in (x, g, x):  # GPUs multiply fp8 only in this layout
            torch.ops.aten._scaled_mm(left, w.t(), one, one, out_dtype=torch.bfloat16)

    one: Tensor = torch.ones((), device=device)
    return scaled if dtype is torch.float8_e4m3fn else linear


@contextmanager
def _fp32_matmuls_as(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
