"""Ranks that are threads of one process, and collectives for them: `torch.distributed` as `Agreement` uses it.

Unlike ranks in processes they take no time to start, can be looked at, and meet any fault that is planted here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch


class Collective(NamedTuple):
    op: str
    dtype: torch.dtype
    numel: int
    device: str


class Group(torch.distributed.ProcessGroup):
    """Some of the ranks."""

    def __init__(self, *ranks: int, name: str = "some") -> None:
        super().__init__(0, len(ranks))
        self.ranks, self.name, self.device_types = ranks, name, ["cpu"]
        self.meets = threading.Barrier(len(ranks), timeout=10.0)
        self.given: dict[int, Any] = {}
        self.store = torch.distributed.HashStore()

    def get_group_store(self) -> Any:
        return self.store

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.name

    def exchange(self, rank: int, given: Any) -> list[Any]:
        """Return what all ranks of the group have given, when all have."""
        self.given[rank] = given
        self.meets.wait()
        everybodys = [self.given[each] for each in self.ranks]
        self.meets.wait()
        return everybodys


class Mesh:
    """A part of a mesh: the groups of a rank, one for each dimension."""

    def __init__(self, groups: Callable[[], list[Group]], shape: tuple[int, ...], names: tuple[str, ...]) -> None:
        self.get_all_groups, self.shape, self.mesh_dim_names = groups, shape, names

    def size(self) -> int:
        return int(torch.tensor(self.shape).prod())


class World:
    """As many ranks as there are to be."""

    def __init__(self, size: int, patch: pytest.MonkeyPatch) -> None:
        self.size = size
        self.world = Group(*range(size), name="world")
        self.collectives: list[Collective] = []  # the first rank's
        self.fault: RuntimeError | None = None
        self._thread = threading.local()
        for name in ("get_rank", "all_reduce", "all_gather_object"):
            patch.setattr(torch.distributed, name, getattr(self, f"_{name}"))
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda group=None: len(self._of(group).ranks))
        patch.setattr(torch.distributed, "get_process_group_ranks", lambda group: list(self._of(group).ranks))
        patch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=self.world))
        patch.setattr(
            torch.distributed,
            "get_backend_config",
            lambda group: ",".join(f"{kind}:gloo" for kind in group.device_types),
        )

    def run(self, of_rank: Callable[[int], Any]) -> list[Any]:
        """Return what each rank returns, or the error that it raises."""

        def become(rank: int) -> Any:
            self._thread.rank = rank
            try:
                return of_rank(rank)
            except threading.BrokenBarrierError:  # a RuntimeError as well, and the others' fault
                raise AssertionError(f"rank {rank} waits for others that do not come") from None
            except (RuntimeError, ValueError) as error:
                if isinstance(error.__cause__, threading.BrokenBarrierError):
                    raise AssertionError(f"rank {rank} waits for others that do not come") from None
                return error

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(become, range(self.size)))

    def _of(self, group: Any) -> Group:
        if group is None:
            return self.world
        assert isinstance(group, Group)
        return group

    def _get_rank(self) -> int:
        return int(self._thread.rank)

    def _all_reduce(self, tensor: torch.Tensor, op: Any, group: Any) -> None:
        if self.fault is not None:
            raise self.fault
        kind = {torch.distributed.ReduceOp.SUM: "sum", torch.distributed.ReduceOp.MAX: "max"}[op]
        if self._get_rank() == 0:
            self.collectives.append(Collective(kind, tensor.dtype, tensor.numel(), tensor.device.type))
        said = self._of(group).exchange(self._get_rank(), (tensor.clone(), kind))
        assert all(operation == kind for _, operation in said)
        everybodys = torch.stack([given for given, _ in said])
        tensor.copy_(everybodys.amax(0) if kind == "max" else everybodys.sum(0))

    def _all_gather_object(self, gathered: list[Any], given: Any, group: Any) -> None:
        assert len(gathered) == len(self._of(group).ranks)
        gathered[:] = self._of(group).exchange(self._get_rank(), given)
