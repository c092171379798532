"""`Exchange`: ranks exchange numbers without the training's groups, and no rank waits for another one for long."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

_dist: Any = dist  # whose stubs do not export all public names

LIMIT = 10.0
"""The longest that a rank waits for the others, in seconds."""

Headers: TypeAlias = list[tuple[int, ...] | None]
"""The numbers of each rank, in order of the ranks; None for a rank that has nothing."""

_NUMBERS = 4  # of a header, after subject, step and whether there are any
_STOPPED = 1 << 40  # a rank that gives up adds this to the number of ranks that came
_NAMED = 10
_ALONE = "if it was busy alone, as with a validation, let the other ranks wait for it: torch.distributed.barrier()"
_OF_PARENT: list[Any] = []  # groups in a forked process: destroying one would wait for its threads, which are not there


class NoExchangeError(Exception):
    """Ranks do not exchange anything, or no longer do. The text says why."""


class _LostConnectionError(Exception):
    """The store or the group failed, or a rank was waited for too long."""


class Exchange:
    """Exchanges numbers between all ranks of `torch.distributed`, over a gloo group of its own.

    Ranks meet in the default store: each announces itself, and the constructor returns when all have. It waits at most
    `LIMIT` seconds, of which the last tenth is for the names of missing ranks; if a rank is missing after the other
    nine, no rank gets an exchange. Ranks meet under a name; of several exchanges of one name on a rank, the first meets
    the first of the others, and so on. A rank that comes too late for one, or missed one, meets the others at their
    next.

    All that is exchanged is exchanged within `at`, in the same order on all ranks. If a rank does not come within
    `LIMIT` seconds, comes with another subject or step, has left or fails, the exchange is over on all ranks: `at`
    raises `NoExchangeError` there, with the cause that the first rank found, and in every later call, without another
    wait. The training's groups are not used, so nothing that happens here can disturb them.

    The group connects all ranks with each other at the first exchange. It exists until `close`.

    Args:
        name: What the exchange is for, the same on all ranks.
        model: A name that must be the same on all ranks.
        agrees: Some property of this rank; see `all_agree`.

    Raises:
        NoExchangeError: Some ranks have not come or have another `model`, or there is no store or no gloo.

    Attributes:
        rank, size: This rank, and the number of ranks.
        all_agree: Whether `agrees` is true on all ranks. All ranks know the same.
    """

    def __init__(self, name: str, model: str = "", *, agrees: bool = False) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._process, self._count = os.getpid(), 0
        self._group: Any = None
        self._over: NoExchangeError | None = None
        try:
            self._rendezvous(name, model, agrees)
            self.all_agree = self._store.add("agree", 0) == self.size  # adding 0 reads
            are_alike = self._store.add(f"model {model}", 0) == self.size
        except (RuntimeError, OSError) as error:  # of the store
            raise NoExchangeError(f"torch.distributed's store failed: {_first_line(error)}") from error
        if not are_alike:
            raise NoExchangeError("the ranks have different models: attach monitors in the same order on all ranks")

    # -- announcements -------------------------------------------------------------------------------------------

    def _rendezvous(self, name: str, model: str, agrees: bool) -> None:
        """Return when all ranks have come; raise `NoExchangeError` on all ranks if one has not."""
        # Enters the loop; a count above size means that this meeting was given up.
        came, began = self.size + 1, time.monotonic()
        while came > self.size:  # the others no longer wait there
            self._store = _store_of(name, self.rank)
            self._store.set(self._key(self.rank), "0")  # announces this rank; later the number of its exchanges
            self._store.add("agree", int(agrees))
            self._store.add(f"model {model}", 1)
            came = self._store.add("came", 1)
        if came == self.size:
            self._store.set("all", "")
        rendezvous_timeout = 0.9 * LIMIT
        if self._comes("all", began + rendezvous_timeout, or_else="missing"):
            return
        before = self._store.add("came", _STOPPED) - _STOPPED
        if before == self.size:  # the last one came at the last moment, and the others go on
            return
        # The first to give up: the others that do so see its _STOPPED in the count.
        if before < self.size:  # one rank looks for those that are missing, because each look costs as many reads
            missing = [rank for rank in range(self.size) if not self._store.check([self._key(rank)])]
            self._store.set("missing", ",".join(map(str, missing)))
        elif not self._comes("missing", began + LIMIT):
            raise NoExchangeError("some ranks did not come")
        missing = [int(rank) for rank in self._store.get("missing").decode().split(",") if rank]
        raise NoExchangeError(f"{ranks_text(missing)} did not come within {rendezvous_timeout:g} s")

    def _comes(self, key: str, deadline: float, or_else: str | None = None) -> bool:
        """Wait for a key in the store, and return True if it came; False at some time, or if another key came.

        Waiting in the store itself would block other threads that use the same connection.
        """
        pause = 0.001
        while not self._store.check([key]):
            now = time.monotonic()
            if now >= deadline or (or_else is not None and self._store.check([or_else])):
                return False
            time.sleep(min(pause, deadline - now))
            pause = min(1.5 * pause, 0.1)
        return True

    # -- exchanges -----------------------------------------------------------------------------------------------

    @contextmanager
    def at(
        self, subject: str, step: int, numbers: Sequence[int] | None, limit: float | None = None
    ) -> Iterator[Headers]:
        """Exchange headers. Inside the block, all ranks call the other methods in the same order.

        Args:
            subject: What is exchanged, the same on all ranks.
            step: Number of the step, the same on all ranks.
            numbers: Up to four integers of 64 bits, which all ranks get; None if this rank has nothing. It joins the
                other calls nevertheless.
            limit: The longest that a rank waits for the others, in seconds, instead of `LIMIT`.

        Raises:
            NoExchangeError: The exchange is over, because of a rank or of an error in the block, or since an earlier
                call.
        """
        if self._over is not None:
            raise self._over
        if os.getpid() != self._process:  # without gloo's threads, every wait would be for ever
            raise NoExchangeError("this process was forked from a rank")
        try:
            self._begin(limit)
            yield self._headers(subject, step, numbers)
        except Exception as error:
            self._over = self._stop(error, step)
            raise self._over from error
        except BaseException:
            self.close()
            raise

    def maximum_of_step(self, step: int, tensor: torch.Tensor, limit: float | None = None) -> None:
        """Replace a tensor on all ranks by the elementwise maximum: one small collective, for use in every step.

        After the first call it does without the look of `at` at the store, and without its check that all ranks are at
        the same step.

        Args:
            step: Number of the step, for the text of an error.
            tensor: See `maximum`.
            limit: The longest that a rank waits for the others, in seconds, instead of `LIMIT`.

        Raises:
            NoExchangeError: See `at`.
        """
        if self._group is None or self._over is not None or os.getpid() != self._process:
            with self.at("the first maximum", step, None, limit):
                self.maximum(tensor)
            return
        self._wait_from_now(limit)
        try:
            self.maximum(tensor)
        except Exception as error:
            self._over = self._stop(error, step)
            raise self._over from error

    def maximum(self, tensor: torch.Tensor) -> None:
        """Replace a tensor on all ranks by the elementwise maximum.

        Args:
            tensor: A contiguous tensor on the CPU of the same shape and dtype on all ranks, as in all methods here.
        """
        self._wait_for("allreduce", _dist.AllreduceOptions(), [tensor], reduceOp=dist.ReduceOp.MAX)

    def sum_on_first(self, tensor: torch.Tensor) -> None:
        """Replace a tensor on rank 0 by the sum over all ranks. On other ranks its values are undefined then."""
        self._reduce(tensor, dist.ReduceOp.SUM)

    def maximum_on_first(self, tensor: torch.Tensor) -> None:
        """Replace a tensor on rank 0 by the elementwise maximum. On other ranks its values are undefined then."""
        self._reduce(tensor, dist.ReduceOp.MAX)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Replace a tensor by that of a rank."""
        self._wait_for("broadcast", dist.BroadcastOptions(), [tensor], rootRank=rank, rootTensor=0)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks on rank 0, an empty list on other ranks."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size if self.rank == 0 else 0)]
        self._wait_for("gather", dist.GatherOptions(), [gathered] if gathered else [], [tensor], rootRank=0)
        return gathered

    def close(self) -> None:
        """Leave the exchange, which is over then on all ranks. May be called again."""
        is_first = self._over is None
        self._over = self._over or NoExchangeError("this rank has left")
        if os.getpid() != self._process:
            _OF_PARENT.append(self._group)
        elif is_first:
            with suppress(Exception):  # of a store that no longer exists
                self._store.set(self._key(self.rank), "left")
        self._group = None

    def _begin(self, limit: float | None) -> None:
        self._count += 1
        self._wait_from_now(limit)
        with _connection():
            self._enter()

    def _wait_from_now(self, limit: float | None) -> None:
        self._began, self._limit = time.monotonic(), LIMIT if limit is None else limit

    def _enter(self) -> None:
        if self._store.check(["over"]):
            raise NoExchangeError(self._said() or "another rank has failed")
        self._store.set(self._key(self.rank), str(self._count))  # tells _cause how far this rank has come
        if self._group is None:
            store = _dist.PrefixStore("gloo", self._store)
            # At the first exchange, because creating it waits for all ranks.
            self._group = _dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=self._limit))

    def _headers(self, subject: str, step: int, numbers: Sequence[int] | None) -> Headers:
        padded = [*(numbers or ()), *[0] * (_NUMBERS - len(numbers or ()))]
        kind = zlib.crc32(subject.encode())
        mine = torch.tensor([kind, step, numbers is not None, *padded])
        of_all = torch.empty(self.size, len(mine), dtype=torch.int64)
        if gathered := self.gather(mine):
            torch.stack(gathered, out=of_all)
        self.broadcast(of_all, 0)
        rows = of_all.tolist()
        others = [rank for rank, row in enumerate(rows) if row[:2] != rows[0][:2]]
        if others:
            first = others[0]
            what = f"step {rows[first][1]}" if rows[first][0] == rows[0][0] else "something else"
            text = f"{ranks_text(others)} did not exchange the same as rank 0: rank 0 is at step {rows[0][1]}"
            raise NoExchangeError(f"{text}, rank {first} at {what}")
        return [tuple(row[3:]) if row[2] else None for row in rows]

    def _reduce(self, tensor: torch.Tensor, operation: Any) -> None:
        self._wait_for("reduce", dist.ReduceOptions(), [tensor], reduceOp=operation, rootRank=0)

    def _wait_for(self, collective: str, options: Any, *tensors: Any, **settings: Any) -> None:
        options.timeout = timedelta(seconds=self._limit)
        for name, value in settings.items():
            setattr(options, name, value)
        with _connection():
            getattr(self._group, collective)(*tensors, options).wait()

    # -- ends ----------------------------------------------------------------------------------------------------

    def _stop(self, error: Exception, step: int) -> NoExchangeError:
        """End the exchange on all ranks, and return why, as far as this rank knows."""
        why: NoExchangeError | None = None
        if isinstance(error, NoExchangeError):
            why = error
        elif isinstance(error, _LostConnectionError):
            self._disconnect()
        else:
            why = NoExchangeError(f"rank {self.rank} failed at step {step}: {_first_line(error)}")
        with suppress(Exception):  # of a store that no longer exists
            # No longer a number, so _cause counts this rank neither as absent nor as silent.
            self._store.set(self._key(self.rank), f"{self._count} out")
            if self._store.add("over", 1) == 1:  # one rank looks for the cause, because each look costs many reads
                why = why or self._cause(error, step)
                self._store.set("why", str(why))
            elif why is None and (said := self._said()):
                why = NoExchangeError(said)
        self._disconnect()
        return why or NoExchangeError(f"the ranks lost their connection at step {step}: {_first_line(error)}")

    def _said(self) -> str | None:
        """Return why the exchange is over, as the first rank that noticed it says; None if it does not."""
        return self._store.get("why").decode() if self._comes("why", time.monotonic() + LIMIT / 5) else None

    def _disconnect(self) -> None:
        """Close the connections, so that ranks that wait for this one notice it at once."""
        with suppress(Exception):
            getattr(self._group, "abort", lambda: None)()  # not in every torch release, and there may be no group
        self._group = None

    def _cause(self, error: Exception, step: int) -> NoExchangeError:
        """Find the ranks that have not come, have left or do not answer; ranks that are late get a moment more."""
        is_timeout = time.monotonic() >= self._began + self._limit
        deadline = time.monotonic() + LIMIT / 10
        while True:
            states = [state.decode() for state in self._store.multi_get([*map(self._key, range(self.size))])]
            left = [rank for rank, state in enumerate(states) if state == "left"]
            absent = [rank for rank, state in enumerate(states) if state.isdecimal() and int(state) < self._count]
            silent = [rank for rank, state in enumerate(states) if state.isdecimal() and int(state) >= self._count]
            # After a timeout, absent ranks are the cause; otherwise late ones get a moment to come or to say "out".
            if not (absent or silent) or (is_timeout and absent) or time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        if left:
            return NoExchangeError(f"{ranks_text(left)} stopped monitoring before step {step}")
        if absent or silent:
            text = f"no answer from {ranks_text(absent or silent)}"
            waited = f" for {self._limit:g} s at step {step}; {_ALONE}" if is_timeout else f" at step {step}"
            return NoExchangeError(text + waited)
        return NoExchangeError(f"the ranks lost their connection at step {step}: {_first_line(error)}")

    @staticmethod
    def _key(rank: int) -> str:
        return f"rank {rank}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return text that names the first ten of some ranks, and says how many there are.

    Example:
        >>> ranks_text([1]), ranks_text([1, 3])
        ('rank 1', 'ranks 1 and 3')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _NAMED:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:_NAMED]))}, ...)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _store_of(name: str, rank: int) -> Any:
    """Return the part of the default store for this exchange, which no other exchange uses."""
    if not dist.is_gloo_available():
        raise NoExchangeError("this build of torch has no gloo")
    world: Any = dist.group.WORLD
    if not hasattr(world, "get_group_store"):
        raise NoExchangeError("this version of torch does not give access to its store")
    ours = _dist.PrefixStore(f"castwise/{name}", world.get_group_store())
    # Numbers this rank's exchanges of this name, so that the n-th meets the n-th.
    return _dist.PrefixStore(str(ours.add(f"of rank {rank}", 1)), ours)


@contextmanager
def _connection() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise _LostConnectionError(str(error)) from error


def _first_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".removeprefix("_LostConnectionError: ")
    return text.splitlines()[0][:120]
