"""The ranks of a training run, and what they know together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

import torch
import torch.distributed as dist

from castwise._warnings import warn
from castwise.monitor._exchange import Exchange, NoExchangeError
from castwise.monitor._reduction import Reduction
from castwise.monitor._sample import Measured
from castwise.monitor._skips import StepFault


def rank_now() -> int:
    """Return this process's rank; before `torch.distributed` is initialised, the rank that `torchrun` set."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    said = os.environ.get("RANK", "")
    return int(said) if said.isdecimal() else 0


class Ranks:
    """All ranks of `torch.distributed`, or this process alone if it is not initialised.

    Ranks combine their results on rank 0, in host memory (see `Exchange`). If that fails, each warns once with the
    cause, and they go on alone: those that have not met each for itself, later rank 0 only.

    Args:
        exchange: Exchanges results with the other ranks. None: this process does not communicate.
        every: Steps between two samples.

    Attributes:
        rank, world_size: This rank, and the number of ranks, whether they communicate or not.
        is_first: Whether this rank writes records: rank 0, or every rank if they have not met.
        is_apart: Whether this rank should write records together with others that it has not met.
        why_alone: Why the ranks do not, or no longer, combine their results, for the record; None otherwise.
    """

    def __init__(self, exchange: Exchange | None = None, every: int = 1) -> None:
        is_alone = not (dist.is_available() and dist.is_initialized())
        self.world_size = 1 if is_alone else dist.get_world_size()
        self.rank = 0 if is_alone else dist.get_rank()
        self.is_first, self.is_apart = exchange is None or self.rank == 0, False
        self.why_alone: str | None = None
        self._exchange, self._every = exchange, every
        self._reduce = None if exchange is None else Reduction(exchange)

    @classmethod
    def alone(cls) -> Ranks:
        """Return an instance for this process alone, which does not communicate and writes its own records."""
        return cls()

    @classmethod
    def together(cls, model: str, every: int, *, agrees: bool) -> Ranks:
        """Meet the other ranks, which waits at most `exchange.LIMIT` seconds for them.

        Args:
            model: The name of the model's class, the same on all ranks.
            every: Steps between two samples.
            agrees: Whether the ranks' scalers take and skip the same steps.
        """
        alone = cls.alone()
        if alone.world_size == 1:
            return alone
        try:
            return cls(Exchange("monitor", model, agrees=agrees), every)
        except NoExchangeError as why:
            alone.is_apart, alone.why_alone = True, str(why)
            _warn(f"the monitor of rank {alone.rank} records this rank alone: {why}")
            return alone

    @property
    def combines_samples(self) -> bool:
        """Whether ranks combine their samples."""
        return self._exchange is not None

    @property
    def is_recorded(self) -> bool:
        """Whether what this rank measures is written anywhere."""
        return self.is_first or self.combines_samples

    @property
    def combines_faults(self) -> bool:
        """Whether ranks combine what they know of skipped steps: all ranks skip the same."""
        return self._exchange is not None and self._exchange.all_agree

    def reduce_sample(self, step: int, mine: Measured | None) -> Measured:
        """Return what all ranks have measured in a step; on other ranks than the first, what this one has.

        Args:
            step: Number of the step.
            mine: This rank's measurements; None if it has none.
        """
        if self._reduce is not None:
            try:
                return self._reduce(step, mine, self._every)
            except NoExchangeError as why:
                self._end(why)
        return Measured() if mine is None else mine

    def gather_faults(self, step: int, mine: StepFault, *, is_sampled: bool) -> tuple[Mapping[int, StepFault], bool]:
        """Return what ranks know of a skipped step, and whether any of them has sampled it for that reason.

        Args:
            step: Number of the step.
            mine: What this rank knows.
            is_sampled: Whether this rank has a sample of the step.

        Returns:
            The skips by rank: of all ranks on the first one, otherwise or without communication this rank's.
        """
        alone = {self.rank: mine}, is_sampled
        if self._exchange is None or not self._exchange.all_agree:
            return alone
        cause, rest = mine.to_numbers()
        try:
            with self._exchange.at("skip", step, [cause, len(rest), is_sampled]) as headers:
                known = {rank: header for rank, header in enumerate(headers) if header is not None}
                is_any_sampled = any(header[2] for header in known.values())
                texts = self._texts(rest, max(header[1] for header in known.values()))
        except NoExchangeError as why:
            self._end(why)
            return alone
        if not self.is_first:
            return {self.rank: mine}, is_any_sampled
        skips = {rank: StepFault.from_numbers(header[0], texts[rank][: header[1]]) for rank, header in known.items()}
        return skips, is_any_sampled

    def _texts(self, mine: bytes, longest: int) -> list[bytes]:
        """Return the texts of all ranks on rank 0, filled up to the longest."""
        assert self._exchange is not None
        if not longest:
            return [b""] * self.world_size
        text = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
        return [bytes(gathered.tolist()) for gathered in self._exchange.gather(text)]

    def _end(self, why: NoExchangeError) -> None:
        self.close()
        self.why_alone = str(why)
        outcome = "rank 0 records itself alone" if self.rank == 0 else f"rank {self.rank} is no longer recorded"
        _warn(f"the monitors of the ranks no longer work together, and {outcome}: {why}")

    def close(self) -> None:
        """Stop communicating. Other ranks notice it in their next exchange."""
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self._reduce = None


def _warn(text: str) -> None:
    with suppress(RuntimeWarning):  # raised where warnings are errors
        warn(text, RuntimeWarning)
