"""Ranks that decide alike: what each has found, reduced to what all of them know, in one small collective.

A collective is a vector of eight fp64 numbers. Two of them are a digest of what the rank has done so far and is doing
now (its settings, its calls, its updates) and the square of that: ranks that do not do the same (a checkpoint that one
of them alone has loaded, a step that one of them left out) are found out by the very next collective in which they
meet, before any has stepped there, at no further cost. Whether there is a collective must not depend on what a rank
alone knows, such as its gradients.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch

from castwise.amp.checks import integer
from castwise.amp.devices import is_capturing
from castwise.amp.left_out import LeftOut
from castwise.amp.readback import Readback

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Ranks: TypeAlias = "ProcessGroup | DeviceMesh"

_SIZE = 8
_FACTS = _SIZE - 2
# Integers up to 2 to this are exact in fp64, whatever order they are added up in.
_BITS = 53
# Powers up to this of norms of fp32 numbers are in the range of fp64.
_LARGEST_POWER = 4.0


class Agreement:
    """A process group or a device mesh whose ranks must take and skip the same steps.

    Args:
        ranks: The group, the mesh, or None for all ranks there are when it is used first. Anything with a `rank()` and
            a `size()` of 1 is a group of this rank alone.
        device_type: Where collectives take place, if the group can do so; the same on all ranks, wherever their
            scales are (some may keep their parameters on the CPU).
        stages: How many parts of the model there are, each on as many of the ranks and on no others.

    Raises:
        TypeError: `ranks` are neither a group nor a mesh, or `stages` is no integer.
        ValueError: `stages` is below 1.
        RuntimeError: This build of torch has no torch.distributed.
    """

    def __init__(self, ranks: Ranks | None, device_type: str, stages: int = 1) -> None:
        if not torch.distributed.is_available():
            raise RuntimeError("this build of torch has no torch.distributed, so there are no ranks to agree with")
        # What new_group() returns to ranks that are not in the group; they may make a scaler, and not use it.
        is_group = hasattr(ranks, "size") and (hasattr(ranks, "rank") or hasattr(ranks, "get_all_groups"))
        if not (ranks is None or _is_outside(ranks) or is_group):
            raise TypeError(f"process_group must be a ProcessGroup or a DeviceMesh, got {type(ranks).__name__}")
        if not integer("pipeline_stages", stages) >= 1:
            raise ValueError(f"pipeline_stages must be an integer >= 1, got {stages!r}")
        self.ranks, self._device_type, self._stages = ranks, device_type, int(stages)
        self._mismatch: tuple[Readback, str] | None = None
        self._device_types: dict[Any, str] = {}  # by group
        self._watched = LeftOut()
        self.start()

    def start(self, *state: float) -> None:
        """Begin a history with some state: whatever ranks did before, from now on they do the same."""
        self._history, self._updates, self._calls, self._left_out = zlib.crc32(repr(state).encode()), 0, 0, 0

    def note_call(self, *call: object) -> None:
        """Add to the history what all ranks do alike."""
        self._calls += 1
        self._history = zlib.crc32(repr(call).encode(), self._history)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch a parameter of the first optimizer, to see when an iteration is left out."""
        self._watched.watch(optimizer)

    def note_loss(self) -> None:
        """Take note of a loss; add to the history that the iteration before was left out, if it was."""
        if self._watched.is_reset():
            self._left_out += 1
            self.note_call("left out")
            self._watched.begin()

    def note_update(self, new_scale: float | None) -> None:
        """Add an update to the history, perhaps one that has set the scale."""
        self.note_call("update", new_scale)
        self._updates, self._calls = self._updates + 1, 0
        self._watched.begin()

    def _groups(self) -> list[Any]:
        if self.ranks is None:
            if not torch.distributed.is_initialized():
                raise RuntimeError("ranks cannot agree yet: call torch.distributed.init_process_group() first")
            return [torch.distributed.group.WORLD]
        if _is_outside(self.ranks):
            raise RuntimeError(f"rank {torch.distributed.get_rank()} is not in the process group of its scaler")
        if not hasattr(self.ranks, "get_all_groups"):
            return [self.ranks]
        if self.ranks.size() == torch.distributed.get_world_size():
            return [torch.distributed.group.WORLD]  # at once, so that none can fail between two dimensions
        mesh: Any = self.ranks
        return list(mesh.get_all_groups())

    def size(self) -> int:
        """Return the number of ranks."""
        return math.prod(group.size() for group in self._groups())

    def is_of_all_ranks(self) -> bool:
        """Return True if no rank is outside of the group."""
        if not torch.distributed.is_initialized() or _is_outside(self.ranks):
            return False
        return self.size() == torch.distributed.get_world_size()

    def ranks_of_a_stage(self) -> int:
        """Return how many ranks a stage of the pipeline is on; raise a ValueError if that does not come out even."""
        size = self.size()
        if size % self._stages:
            raise ValueError(f"pipeline_stages must divide the number of ranks, {size}, got {self._stages}")
        return size // self._stages

    def copies(self) -> int:
        """Return how many ranks hold the same part of what FSDP1 has flattened, as a mesh names them.

        An axis along which FSDP1 replicates (HYBRID_SHARD) is one whose name contains "replicate".
        """
        names = getattr(self.ranks, "mesh_dim_names", None) or ()
        shape = getattr(self.ranks, "shape", ())
        return math.prod(size for name, size in zip(names, shape, strict=False) if "replicate" in name)

    def any_(self, flags: Sequence[torch.Tensor], call: str) -> None:
        """Set each flag to 1 on all ranks if it is not 0 on one.

        Args:
            flags: fp32, one element each, on one device; as many on all ranks. One collective takes up to six.
            call: What the ranks are doing, with what; the same on all of them.

        Raises:
            RuntimeError: The ranks are not doing the same, or one of them cannot be reached. The flags are as before.
        """
        while flags and self.size() > 1:
            now, flags = flags[:_FACTS], flags[_FACTS:]
            for flag, count in zip(now, self._sum(now, f"{call} for {len(now)}"), strict=True):
                flag.copy_(count > 0) if isinstance(count, torch.Tensor) else flag.fill_(float(count > 0))

    def norm(self, norm: torch.Tensor, norm_type: float, call: str, share: float = 1.0) -> torch.Tensor:
        """Return the p-norm (shape ()) of all ranks' numbers together: not finite if that of one rank is not.

        For p > 4 it takes two collectives.

        Args:
            norm: Of this rank, >= 0, shape ().
            norm_type: p > 0, or inf.
            call: As in `any_`.
            share: How much of its power is this rank's own to count: 1 / n if n ranks hold the same numbers.

        Raises:
            RuntimeError: As in `any_`.
        """
        if self.size() == 1:
            return norm
        if norm_type == math.inf:
            return self.maxima([norm], call)[0]
        if norm_type <= _LARGEST_POWER:
            return _root(self._sum([norm], call, norm_type, share)[0], norm_type, like=norm)
        # Powers that no dtype can hold: the largest norm is taken out of the sum.
        (peak,) = self.maxima([norm], call)
        unit = torch.where(peak.isfinite() & (peak > 0), peak, torch.ones_like(peak))
        return unit * _root(self._sum([norm / unit], call, norm_type, share)[0], norm_type, like=norm)

    def maxima(self, numbers: Sequence[torch.Tensor], call: str) -> list[torch.Tensor]:
        """Return the largest of each number over the ranks: inf if that of one rank is not finite.

        Args:
            numbers: At most six, one element each, >= 0, on one device.
            call: As in `any_`.

        Raises:
            RuntimeError: As in `any_`.
        """
        if self.size() == 1:
            return list(numbers)
        said, digest, _ = self._say(call)
        head = _fp64([digest, -digest]).to(numbers[0].device, non_blocking=True)  # two maxima: all digests are the same
        facts = torch.cat([number.reshape(1).double() for number in numbers]).nan_to_num(nan=math.inf, posinf=math.inf)
        vector = torch.cat([head, facts, facts.new_zeros(_FACTS - len(numbers))])  # a maximum might lose a NaN
        reduced = self._reduce(vector, torch.distributed.ReduceOp.MAX)
        return self._checked(reduced, head, said)[: len(numbers)]

    def _sum(self, facts: Sequence[torch.Tensor], call: str, power: float = 1.0, share: float = 1.0) -> list[Any]:
        """Add up powers of numbers over the ranks; raise on all of them if they differ in what they do.

        Args:
            facts: At most six, one element each, >= 0.
            call: As in `any_`.
            power: Of which to take the sum.
            share: What to multiply each with.

        Returns:
            The sums: floats of numbers on a CPU, otherwise tensors (fp64, shape ()).
        """
        said, digest, size = self._say(call)
        # Of integers whose sum is n * d and whose sum of squares is n * d**2, all are d.
        mine, padding = [float(digest), float(digest**2)], [0.0] * (_FACTS - len(facts))
        if facts[0].device.type == "cpu":  # a few numbers are handled faster by the host, which has to know them anyway
            known = [_power(fact.item(), power) * share for fact in facts]
            reduced = self._reduce(_fp64([*mine, *known, *padding]), torch.distributed.ReduceOp.SUM).tolist()
            if reduced[:2] != [size * number for number in mine]:
                self._raise(said)
            return reduced[2 : 2 + len(facts)]
        device = facts[0].device
        head, powers = (
            _fp64(mine).to(device, non_blocking=True),
            torch.cat([fact.reshape(1) for fact in facts]).double(),
        )
        vector = torch.cat([head, powers**power * share, powers.new_zeros(len(padding))])
        sums = self._checked(self._reduce(vector, torch.distributed.ReduceOp.SUM), head * size, said)
        return sums[: len(facts)]

    def _checked(self, reduced: torch.Tensor, expected: torch.Tensor, said: str) -> list[torch.Tensor]:
        """Return a vector's facts; if its head is not as expected raise, on an accelerator later, and spoil them."""
        differs = (reduced[:2] != expected).any()
        if differs.device.type == "cpu":
            if differs:
                self._raise(said)
        elif not is_capturing(differs):
            self._mismatch = Readback(differs), said
        return list(reduced[2:].masked_fill(differs, math.inf).unbind())  # so that no rank steps

    def _say(self, call: str) -> tuple[str, int, int]:
        """Return what this rank is doing, a digest of it whose sum of squares is exact, and the number of ranks."""
        self.check_pending_mismatch()
        said, size = f"{call}, call {self._calls} after {self._updates} updates", self.size()
        if self._left_out:
            said += f", {self._left_out} of its iterations left out"
        return said, zlib.crc32(said.encode(), self._history) % 2 ** ((_BITS - size.bit_length()) // 2), size

    def _device_type_of(self, group: Any) -> str:
        """Return the type of device whose tensors a group reduces: the scaler's if it can."""
        known = self._device_types.get(group)
        if known is None:
            backends = torch.distributed.get_backend_config(group).split(",")  # such as cpu:gloo,cuda:nccl
            device_types = [backend.partition(":")[0] for backend in backends]
            known = self._device_type if self._device_type in device_types else device_types[0]
            self._device_types[group] = known
        return known

    def _reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        # Along the dimensions of a mesh one after the other. On an accelerator the stream waits, and the host does not.
        for group in self._groups():
            device_type = self._device_type_of(group)
            there = tensor if tensor.device.type == device_type else tensor.to(device_type)
            try:
                torch.distributed.all_reduce(there, op, group)
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {torch.distributed.get_rank()} could not agree with the others of the process group "
                    f"{group.group_name!r} (ranks {torch.distributed.get_process_group_ranks(group)}) on whether to "
                    f"take this step, so it has not stepped: has one of them ended, left out a call or disabled its "
                    f"scaler? {error}"
                ) from error
            tensor = there.to(tensor.device)
        return tensor

    def check_pending_mismatch(self) -> None:
        """Raise if the last collective found that the ranks do not do the same; waits for the device."""
        pending, self._mismatch = self._mismatch, None
        if pending is not None and pending[0].wait():
            self._raise(pending[1])

    def _raise(self, said: str) -> NoReturn:
        of_ranks: list[Any] = [(torch.distributed.get_rank(), said, self._history)]
        for group in self._groups():
            gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(gathered, of_ranks, group)
            of_ranks = [of_rank for of_group in gathered for of_rank in of_group]
        alike: defaultdict[str, list[int]] = defaultdict(list)
        for rank, what, history in sorted(of_ranks):
            alike[f"{what} (history {history:08x})"].append(rank)
        views = "; ".join(f"ranks {ranks} say: {what}" for what, ranks in alike.items())
        raise RuntimeError(
            "the ranks no longer do the same with their scalers, so none of them has stepped: make, load, step and "
            f"update them alike on all ranks. {views}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Agreement:
        twin = object.__new__(Agreement)
        # A process group cannot be copied, and need not be.
        twin.__dict__.update(self.__dict__, _mismatch=None, _watched=LeftOut())
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if self.ranks is not None:
            raise RuntimeError(
                "a process group cannot be pickled, and so neither can a scaler that has one: save its state_dict()"
            )
        return self.__dict__ | {"_mismatch": None, "_watched": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _watched=LeftOut())


def _is_outside(ranks: object) -> bool:
    return ranks is torch.distributed.GroupMember.NON_GROUP_MEMBER


def _fp64(numbers: Sequence[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _power(number: float, power: float) -> float:
    try:
        return float(number**power)
    except OverflowError:
        return math.inf


def _root(total: Any, power: float, like: torch.Tensor) -> torch.Tensor:
    root = total ** (1.0 / power)
    return root if isinstance(root, torch.Tensor) else like.new_tensor(root)
