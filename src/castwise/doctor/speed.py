"""How fast a device multiplies matrices in each format.

What is timed is a linear layer's three products of a training step, `x @ w.T`, `g @ w` and `g.T @ x` with square
matrices: emulated formats differ by ten between them. The formats take turns in random order, so that a change of clock
or a busy neighbour hits all of them, and a ratio is one of times taken within the same turn.
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

from castwise.doctor.formats import DTYPES

SMALLEST, LARGEST = 256, 4096
ROUNDS, FEWEST_ROUNDS = 11, 3
# An emulated format would hold the others down to a size at which they are not yet at their fastest.
_SLOW_FROM = 4.0
_NOISY_FROM = 1.5
GAIN = 1.1  # less is not worth a change of precision

Progress = Callable[[str, int, int], object]
"""Told what is being done, how much of it is done, and how much there is."""
Verdict = Literal["faster", "as fast", "slower", "too noisy to tell"]


@dataclass(frozen=True)
class Quartiles:
    """First quartile, median and third quartile of what was measured."""

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
    """How fast matrix products in a format are.

    Attributes:
        size: Rows and columns of the matrices.
        gflops: 10^9 multiplications and additions per second.
        times_fp32: The same in multiples of fp32's, in the same turn: above 1 is faster.
    """

    size: int
    gflops: Quartiles
    times_fp32: Quartiles

    @property
    def verdict(self) -> Verdict:
        """What three turns of four agree about."""
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
        device: Where.
        formats: Names of `castwise.doctor.formats.DTYPES`, fp32 among them.
        budget_s: Seconds that this may take, about. Emulated formats on slow machines take some more.
        progress: Called before each turn.

    Returns:
        For each format its speed, or in words why there is none.

    Example:
        >>> speeds = measure(torch.device("cpu"), ["fp32", "bf16"], budget_s=0.1)
        >>> speeds["fp32"].times_fp32.median
        1.0
    """
    found: dict[str, Speed | str] = {}
    seconds: dict[str, float] = {}
    for name in formats:
        try:
            seconds[name] = _warm(device, name, SMALLEST)()
        except (RuntimeError, TypeError) as error:  # there is no kernel for it, or no memory
            found[name] = str(error).partition("\n")[0]
    if "fp32" not in seconds:
        return {**dict.fromkeys(formats, "there is no fp32 to compare with"), **found}
    slow = [name for name in seconds if seconds[name] > _SLOW_FROM * seconds["fp32"]]
    fast = [name for name in seconds if name not in slow]
    races = [race for race in (["fp32", *slow] if slow else [], fast) if race]
    for race in races:  # the fast ones last: their race is where fp32's own speed is from
        found |= _race(device, race, budget_s / len(races), progress)
    return {name: found[name] for name in formats}


def _race(device: torch.device, formats: list[str], budget_s: float, progress: Progress) -> dict[str, Speed]:
    size = SMALLEST
    while True:
        runs = {name: _warm(device, name, size) for name in formats}
        a_round = min(sum(run() for run in runs.values()) for _ in range(2))  # one may have been held up
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
    """Return what runs the products once and says how many seconds they took; their kernels have been loaded."""
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
        for left in (x, g, x):  # GPUs multiply fp8 in this layout alone
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
