"""Make all ranks take the same decision: one small collective reduces the ranks' results to one that all of them have.

A collective is a vector of eight fp64 numbers. Two of them are a digest of what the rank has done and is doing now (its
settings, calls and updates) and the digest's square. So the next collective also detects, at no extra cost and before
any rank steps, that ranks have diverged, for example because one of them loaded another checkpoint or left out a step.
Whether there is a collective must not depend on what only one rank knows, such as its gradients.

found_inf is reduced in two places: in `any_`, which `GradScaler._reduce_found_inf` calls, and within the norm of
`GradScaler.clip_grad_norm_`, as an inf. A reduction must give the same on all ranks, keep an inf, and show whether all
digests are equal: a sum by that of the digests and of their squares, a maximum by the digest and its negative.
Without an agreement, only norms of DTensors are reduced, over their own mesh, in `_measure`.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch

from castwise.amp import _torch_words as torch_words
from castwise.amp._checks import integer
from castwise.amp._devices import is_capturing
from castwise.amp._disagreement import failures_of, shortened, views_of
from castwise.amp._left_out import LeftOut
from castwise.amp._readback import Readback

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Ranks: TypeAlias = "ProcessGroup | DeviceMesh"

_SIZE = 8
_FACTS = _SIZE - 2
# Integers up to 2**53 are exact in fp64, in whatever order they are added.
_BITS = 53
# Up to this power, norms of fp32 numbers stay in the range of fp64.
_LARGEST_POWER = 4.0
# An accelerator's check of a collective is read at the collective so many later: of an iteration that has no more than
# that, none waits for the device. Counted in collectives, because ranks that diverge may differ in their updates.
_CHECK_DELAY = 4


class Agreement:
    """A process group or a device mesh whose ranks must take and skip the same steps.

    Args:
        ranks: The group, the mesh, or None for all ranks that exist at the first use. An object with a `rank()` and a
            `size()` of 1 is a group of this rank alone.
        device_type: The type of device for collectives, if the group supports it; the same on all ranks, even if some
            keep their parameters and scales on the CPU.
        stages: The number of pipeline stages, each on the same number of ranks and on no others.

    Raises:
        TypeError: `ranks` is neither a group nor a mesh, or `stages` is not an integer.
        ValueError: `stages` is below 1.
        RuntimeError: This build of torch has no torch.distributed.
    """

    def __init__(self, ranks: Ranks | None, device_type: str, stages: int = 1) -> None:
        if not torch.distributed.is_available():
            raise RuntimeError("this build of torch has no torch.distributed, so there are no ranks to agree with")
        # Ranks outside the group get a mark from new_group(): they may create a scaler, but not use it.
        is_group = hasattr(ranks, "size") and (hasattr(ranks, "rank") or hasattr(ranks, "get_all_groups"))
        if not (ranks is None or _is_outside(ranks) or is_group):
            raise TypeError(f"process_group must be a ProcessGroup or a DeviceMesh, got {type(ranks).__name__}")
        if not integer("pipeline_stages", stages) >= 1:
            raise ValueError(f"pipeline_stages must be an integer >= 1, got {stages!r}")
        self.ranks, self._device_type, self._stages = ranks, device_type, int(stages)
        self._unchecked: deque[tuple[Readback, str]] = deque()
        self._device_types: dict[Any, str] = {}  # by group
        self._watched = LeftOut()
        self.start()

    def start(self, *state: float) -> None:
        """Begin a new history from some state, whatever the ranks did before."""
        self._history, self._updates, self._calls, self._left_out = zlib.crc32(repr(state).encode()), 0, 0, 0

    def note_call(self, *call: object) -> None:
        """Add a call to the history, which must be the same on all ranks."""
        self._calls += 1
        self._history = zlib.crc32(repr(call).encode(), self._history)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch a parameter of the first optimizer, to detect iterations that are left out."""
        self._watched.watch(optimizer)

    def note_loss(self) -> None:
        """Note a loss; if the previous iteration was left out, record that in the history."""
        if self._watched.is_reset():
            self._left_out += 1
            self.note_call("left out")
            self._watched.begin()

    def note_update(self, new_scale: float | None) -> None:
        """Add an update to the history, with the scale that it has set, if any."""
        self.note_call("update", new_scale)
        self._updates, self._calls = self._updates + 1, 0
        self._watched.begin()

    def _groups(self) -> list[Any]:
        if self.ranks is None:
            if not torch.distributed.is_initialized():
                ours = RuntimeError("ranks cannot agree yet: call torch.distributed.init_process_group() first")
                raise torch_words.error(ours, torch.distributed.get_world_size)
            return [torch.distributed.group.WORLD]
        if _is_outside(self.ranks):
            raise RuntimeError(
                f"rank {torch.distributed.get_rank()} is not in the process group of its scaler: use the scaler only "
                "on ranks of the group"
            )
        if not hasattr(self.ranks, "get_all_groups"):
            return [self.ranks]
        if self.ranks.size() == torch.distributed.get_world_size():
            return [torch.distributed.group.WORLD]  # in one collective, which cannot fail between two dimensions
        mesh: Any = self.ranks
        return list(mesh.get_all_groups())

    def size(self) -> int:
        """Return the number of ranks."""
        return math.prod(group.size() for group in self._groups())

    def is_of_all_ranks(self) -> bool:
        """Return True if the group contains all ranks."""
        if not torch.distributed.is_initialized() or _is_outside(self.ranks):
            return False
        return self.size() == torch.distributed.get_world_size()

    @property
    def has_stages(self) -> bool:
        """Whether the ranks are those of several stages of a pipeline, of which only the last has a loss."""
        return self._stages > 1

    def ranks_of_a_stage(self) -> int:
        """Return the number of ranks per pipeline stage; raise a ValueError if the ranks do not divide evenly."""
        size = self.size()
        if size % self._stages:
            raise ValueError(f"pipeline_stages must divide the number of ranks, {size}, got {self._stages}")
        return size // self._stages

    def copies(self) -> int:
        """Return how many ranks hold the same part of a parameter that FSDP1 flattened, from the mesh's axis names.

        FSDP1 replicates (HYBRID_SHARD) along axes whose name contains "replicate".
        """
        names = getattr(self.ranks, "mesh_dim_names", None) or ()
        shape = getattr(self.ranks, "shape", ())
        return math.prod(size for name, size in zip(names, shape, strict=False) if "replicate" in name)

    def any_(self, flags: Sequence[torch.Tensor], call: str) -> None:
        """Set each flag to 1 on all ranks if it is not 0 on any rank.

        Args:
            flags: fp32, one element each, on one device; the same number on all ranks. One collective holds up to six.
            call: A description of the call and its arguments, the same on all ranks.

        Raises:
            RuntimeError: The ranks have diverged, or one of them cannot be reached. Flags that were not reduced before
                are unchanged. On an accelerator, ranks that have diverged get flags of 1, so that none steps, and the
                error in a later call.
        """
        while flags and self.size() > 1:
            now, flags = flags[:_FACTS], flags[_FACTS:]
            for flag, count in zip(now, self._sum(now, f"{call} for {len(now)}"), strict=True):
                flag.copy_(count > 0) if isinstance(count, torch.Tensor) else flag.fill_(float(count > 0))

    def norm(self, norm: torch.Tensor, norm_type: float, call: str, share: float = 1.0) -> torch.Tensor:
        """Return the p-norm (shape ()) of all ranks' numbers together; not finite if that of any rank is not.

        p > 4 needs two collectives.

        Args:
            norm: The norm of this rank's numbers, >= 0, shape ().
            norm_type: p > 0, or inf.
            call: As in `any_`.
            share: What share of norm**p this rank counts: 1 / n if n ranks hold the same numbers.

        Raises:
            RuntimeError: As in `any_`.
        """
        if self.size() == 1:
            return norm
        if norm_type == math.inf:
            return self.maxima([norm], call)[0]
        if norm_type <= _LARGEST_POWER:
            return _root(self._sum([norm], call, norm_type, share)[0], norm_type, like=norm)
        # No dtype can hold such powers, so the largest norm is factored out of the sum.
        (peak,) = self.maxima([norm], call)
        unit = torch.where(peak.isfinite() & (peak > 0), peak, torch.ones_like(peak))
        return unit * _root(self._sum([norm / unit], call, norm_type, share)[0], norm_type, like=norm)

    def maxima(self, numbers: Sequence[torch.Tensor], call: str) -> list[torch.Tensor]:
        """Return the maximum of each number over the ranks; inf if that of any rank is not finite.

        Args:
            numbers: At most six, one element each, >= 0, on one device.
            call: As in `any_`.

        Raises:
            RuntimeError: As in `any_`.
        """
        if self.size() == 1:
            return list(numbers)
        self._check_earlier(numbers[0])
        text, digest, _ = self._describe(call)
        head = _pair(digest, -digest, numbers[0].device)  # same maxima: all digests are equal
        facts = torch.cat([number.reshape(1).double() for number in numbers]).nan_to_num(nan=math.inf, posinf=math.inf)
        vector = torch.cat([head, facts, facts.new_zeros(_FACTS - len(numbers))])  # a maximum might lose a NaN
        reduced = self._reduce(vector, torch.distributed.ReduceOp.MAX, text)
        return self._checked(reduced, head, text)[: len(numbers)]

    def _sum(self, facts: Sequence[torch.Tensor], call: str, power: float = 1.0, share: float = 1.0) -> list[Any]:
        """Add up powers of numbers over the ranks; raise on all ranks if they have diverged.

        Args:
            facts: At most six, one element each, >= 0.
            call: As in `any_`.
            power: The exponent.
            share: The factor of each power.

        Returns:
            The sums: floats if the numbers are on a CPU, otherwise tensors (fp64, shape ()).
        """
        self._check_earlier(facts[0])
        text, digest, size = self._describe(call)
        # If n integers add up to n * d and their squares to n * d**2, all of them are d.
        mine, padding = (float(digest), float(digest**2)), [0.0] * (_FACTS - len(facts))
        if facts[0].device.type == "cpu":  # the host is faster for a few numbers, and needs them anyway
            known = [_power(fact.item(), power) * share for fact in facts]
            reduced = self._reduce(_fp64([*mine, *known, *padding]), torch.distributed.ReduceOp.SUM, text).tolist()
            if reduced[:2] != [size * number for number in mine]:
                self._raise(text)
            return reduced[2 : 2 + len(facts)]
        device = facts[0].device
        head, powers = _pair(*mine, device), torch.cat([fact.reshape(1) for fact in facts]).double()
        vector = torch.cat([head, powers**power * share, powers.new_zeros(len(padding))])
        sums = self._checked(self._reduce(vector, torch.distributed.ReduceOp.SUM, text), head * size, text)
        return sums[: len(facts)]

    def _checked(self, reduced: torch.Tensor, expected: torch.Tensor, text: str) -> list[torch.Tensor]:
        """Return a vector's facts; if its head is not as expected, raise, or on an accelerator return inf for now.

        From then on the ranks' digests differ, so no rank steps until a later collective raises.
        """
        differs = (reduced[:2] != expected).any()
        if differs.device.type == "cpu":
            if differs:
                self._raise(text)
        elif not is_capturing(differs):
            self._unchecked.append((Readback(differs), text))
        return list(reduced[2:].masked_fill(differs, math.inf).unbind())  # so that no rank steps

    def _describe(self, call: str) -> tuple[str, int, int]:
        """Return a description of this rank's call, a digest whose sum of squares is exact, and the number of ranks."""
        text, size = f"{call}, call {self._calls} after {self._updates} updates", self.size()
        if self._left_out:
            text += f", {self._left_out} of its iterations left out"
        return text, zlib.crc32(text.encode(), self._history) % 2 ** ((_BITS - size.bit_length()) // 2), size

    def _device_type_of(self, group: Any) -> str:
        """Return the type of device on which a group reduces tensors: the scaler's, if the group supports it."""
        known = self._device_types.get(group)
        if known is None:
            backends = torch.distributed.get_backend_config(group).split(",")  # such as cpu:gloo,cuda:nccl
            device_types = [backend.partition(":")[0] for backend in backends]
            known = self._device_type if self._device_type in device_types else device_types[0]
            self._device_types[group] = known
        return known

    def _reduce(self, tensor: torch.Tensor, op: Any, text: str) -> torch.Tensor:
        # The dimensions of a mesh are reduced one by one. On an accelerator the stream waits, but the host does not.
        for group in self._groups():
            device_type = self._device_type_of(group)
            there = tensor if tensor.device.type == device_type else tensor.to(device_type)
            try:
                torch.distributed.all_reduce(there, op, group)
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {torch.distributed.get_rank()} could not agree with the other ranks of process group "
                    f"{group.group_name!r} on whether to take step {self._updates + 1}, so it has not stepped: check "
                    f"whether a rank has ended, left out a call or disabled its scaler. {failures_of(group, text)}. "
                    f"{shortened(str(error))}"
                ) from error
            tensor = there.to(tensor.device)
        return tensor

    def _check_earlier(self, like: torch.Tensor) -> None:
        """Raise if a collective that is long enough ago found that the ranks have diverged.

        Args:
            like: A tensor on the device of the collectives, which is not waited for during capture in a CUDA graph.
        """
        if len(self._unchecked) < _CHECK_DELAY or is_capturing(like):
            return
        differs, text = self._unchecked.popleft()
        if differs.wait():
            self._unchecked.clear()
            self._raise(text)

    def _raise(self, text: str) -> NoReturn:
        """Exchange what each rank did, and raise; if a rank ends meanwhile, raise with what is known."""
        reports = [(torch.distributed.get_rank(), f"{text} (history {self._history:08x})")]
        unheard = ""
        try:
            for group in self._groups():
                gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
                torch.distributed.all_gather_object(gathered, reports, group)
                reports = [report for of_group in gathered for report in of_group]
        except RuntimeError as error:
            unheard = f"; the others could not be asked: {shortened(str(error))}"
        raise RuntimeError(
            "the ranks no longer use their scalers in the same way, so none of them has stepped: create, load, step "
            f"and update scalers in the same way on all ranks. {views_of(reports)}{unheard}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Agreement:
        twin = object.__new__(Agreement)
        # A process group cannot be copied, and need not be.
        twin.__dict__.update(self.__dict__, _unchecked=deque(), _watched=LeftOut())
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if self.ranks is not None:
            raise RuntimeError(
                "a process group cannot be pickled, and so neither can a scaler that has one: save its state_dict()"
            )
        return self.__dict__ | {"_unchecked": deque(), "_watched": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _watched=LeftOut())


def _is_outside(ranks: object) -> bool:
    return ranks is torch.distributed.GroupMember.NON_GROUP_MEMBER


def _fp64(numbers: Sequence[float]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _pair(first: float, second: float, device: torch.device) -> torch.Tensor:
    """Return two fp64 numbers on a device; filled there, because a CUDA graph captures no copy from pageable memory."""
    pair = torch.full((2,), first, dtype=torch.float64, device=device)
    pair[1].fill_(second)
    return pair


def _power(number: float, power: float) -> float:
    try:
        return float(number**power)
    except OverflowError:
        return math.inf


def _root(total: Any, power: float, like: torch.Tensor) -> torch.Tensor:
    root = total ** (1.0 / power)
    return root if isinstance(root, torch.Tensor) else like.new_tensor(root)
