"""Ranks that decide alike: what each has found, reduced to what all of them know, in one small collective.

A collective is two numbers of 64 bits. Beside what was found it carries a digest of what the rank has done so far and
is doing now: its settings, its calls, its updates. Ranks that do not do the same (a checkpoint that one of them alone
has loaded, a step that one of them left out) are found out by the very next collective in which they meet, before any
has stepped there, at no further cost. So all collectives have one size, and all but those of maxima one operation; and
whether there is one must not depend on what a rank alone knows, such as its gradients.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch

from castwise._torch_private import device_types_of
from castwise.amp.checks import integer
from castwise.amp.devices import is_capturing
from castwise.amp.readback import Readback

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Ranks: TypeAlias = "ProcessGroup | DeviceMesh"

# Integers up to 2 to this are exact in fp64, whatever order they are added up in.
_BITS = 53
# A norm that is not negative sorts as its 63 bits do; its lowest 16 give way to a flag and a digest.
_DIGEST_BITS = 15
_CUT_BITS = _DIGEST_BITS + 1
_NORM_BITS = 63 - _CUT_BITS
# Powers up to this of norms of fp32 numbers are in the range of fp64.
_LARGEST_POWER = 4.0


class Agreement:
    """A process group or a device mesh whose ranks must take and skip the same steps.

    Args:
        ranks: The group, the mesh, or None for all ranks there are when it is used first.
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
        is_outside = _is_outside(ranks)
        is_mesh = hasattr(ranks, "get_all_groups")
        if not (ranks is None or is_outside or is_mesh or isinstance(ranks, torch.distributed.ProcessGroup)):
            raise TypeError(f"process_group must be a ProcessGroup or a DeviceMesh, got {type(ranks).__name__}")
        if not integer("pipeline_stages", stages) >= 1:
            raise ValueError(f"pipeline_stages must be an integer >= 1, got {stages!r}")
        self.ranks, self._device_type, self._stages = ranks, device_type, int(stages)
        self._doubt: tuple[Readback, str] | None = None
        self.start()

    def start(self, *state: float) -> None:
        """Begin a history with some state: whatever ranks did before, from now on they do the same."""
        self._history, self._updates, self._calls = zlib.crc32(repr(state).encode()), 0, 0

    def note_call(self, *call: object) -> None:
        """Add to the history what all ranks do alike."""
        self._calls += 1
        self._history = zlib.crc32(repr(call).encode(), self._history)

    def note_update(self, new_scale: float | None) -> None:
        """Add an update to the history, perhaps one that has set the scale."""
        self.note_call("update", new_scale)
        self._updates, self._calls = self._updates + 1, 0

    def _groups(self) -> list[Any]:
        if self.ranks is None:
            if not torch.distributed.is_initialized():
                raise RuntimeError("ranks cannot agree yet: call torch.distributed.init_process_group() first")
            return [torch.distributed.group.WORLD]
        if isinstance(self.ranks, torch.distributed.ProcessGroup):
            return [self.ranks]
        if _is_outside(self.ranks):
            raise RuntimeError(f"rank {torch.distributed.get_rank()} is not in the process group of its scaler")
        if self.ranks.size() == torch.distributed.get_world_size():
            return [torch.distributed.group.WORLD]  # at once, so that none can fail between two dimensions
        groups: list[Any] = self.ranks.get_all_groups()
        return groups

    def size(self) -> int:
        """Return the number of ranks."""
        return math.prod(torch.distributed.get_world_size(group) for group in self._groups())

    def is_of_all_ranks(self) -> bool:
        """Say whether no rank is outside of the group."""
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
        """Set each flag to 1 on all ranks if it is 1 on one.

        Args:
            flags: fp32, one element each, on one device; as many on all ranks.
            call: What the ranks are doing, with what; the same on all of them.

        Raises:
            RuntimeError: The ranks are not doing the same, or one of them cannot be reached. The flags are as before.
        """
        size = self.size()
        base = size + 1
        per_number = int(_BITS / math.log2(base))  # flags that fit into a number, as digits
        while flags:
            now, flags = flags[: 1 + per_number], flags[1 + per_number :]
            said, digest, shift = self._says(f"{call} for {len(now)}", size)
            first, *others = ((flag.reshape(1) != 0).double() for flag in now)
            digits = torch.cat(
                [flag.mul_(base**digit) for digit, flag in enumerate(others)] or [torch.zeros_like(first)]
            )
            packed = torch.cat([first.mul_(shift).add_(digest), digits.sum(0, keepdim=True)])
            reduced = self._reduce_(packed, torch.distributed.ReduceOp.SUM)
            found, is_other = _unpacked(reduced[0], shift, size * digest)
            self._object_if(is_other, said)
            now[0].copy_(found.logical_or_(is_other))
            for digit, flag in enumerate(now[1:]):
                flag.copy_((reduced[1].div(base**digit).floor_() % base > 0).logical_or_(is_other))

    def norm(
        self, found_inf: torch.Tensor, norm: torch.Tensor, norm_type: float, call: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the found_inf (fp32, shape ()) and the p-norm (fp64, shape ()) of all ranks' gradients together.

        The norm is right to 1e-10 for p = inf. For p > 4 it takes two collectives.

        Args:
            found_inf: Of this rank, fp32, shape ().
            norm: Of this rank, fp64, shape (), on the same device.
            norm_type: p > 0, or inf.
            call: As in `any_`.

        Raises:
            RuntimeError: As in `any_`.
        """
        size = self.size()
        said, digest, shift = self._says(call, size)
        if norm_type == math.inf:
            return self._largest(found_inf, norm, said, digest % 2**_DIGEST_BITS)
        if norm_type > _LARGEST_POWER:
            # A second collective, for powers that no dtype can hold: the largest norm is taken out of the sum.
            found_inf, peak = self._largest(found_inf, norm, said, digest % 2**_DIGEST_BITS)
            unit = torch.where(peak.isfinite() & (peak > 0), peak, torch.ones_like(peak))
            ratios = (norm / unit).pow(norm_type).reshape(1)
            total = self._reduce_(torch.cat([ratios, torch.zeros_like(ratios)]), torch.distributed.ReduceOp.SUM)[0]
            return found_inf, unit * total ** (1.0 / norm_type)
        facts = torch.stack([found_inf.double() * shift + digest, norm.double() ** norm_type])
        packed, total = self._reduce_(facts, torch.distributed.ReduceOp.SUM)
        found, is_other = _unpacked(packed, shift, size * digest)
        self._object_if(is_other, said)
        return (found | is_other).float(), total ** (1.0 / norm_type)

    def _largest(
        self, found_inf: torch.Tensor, norm: torch.Tensor, said: str, digest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take maxima of (digest, found, norm), and of its like with the digest's complement: are both as mine?"""
        ours = digest, 2**_DIGEST_BITS - 1 - digest
        rest = (norm.double().view(torch.int64) >> _CUT_BITS) + (found_inf != 0).long() * 2**_NORM_BITS
        facts = torch.stack([rest + (digest << (_NORM_BITS + 1)) for digest in ours])
        first, second = self._reduce_(facts, torch.distributed.ReduceOp.MAX)
        is_other = (first >> (_NORM_BITS + 1) != ours[0]) | (second >> (_NORM_BITS + 1) != ours[1])
        self._object_if(is_other, said)
        found = (first >> _NORM_BITS) % 2 == 1
        return (found | is_other).float(), ((first % 2**_NORM_BITS) << _CUT_BITS).view(torch.float64)

    def _says(self, call: str, size: int) -> tuple[str, int, int]:
        """Return what this rank is doing, a digest of it, and what to multiply flags with so that both fit in a sum."""
        self.settle_doubt()
        said = f"{call}, call {self._calls} after {self._updates} updates"
        bits = size.bit_length()
        digest = zlib.crc32(said.encode(), self._history) % 2 ** (_BITS - 2 * bits)
        return said, digest, 2 ** (_BITS - bits)

    def _reduce_(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        # Along the dimensions of a mesh one after the other. On an accelerator the stream waits, and the host does not.
        for group in self._groups():
            device_types = device_types_of(group)
            device_type = self._device_type if self._device_type in device_types else device_types[0]
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

    def _object_if(self, is_other: torch.Tensor, said: str) -> None:
        """Raise on all ranks if they do not do the same: on a CPU at once, else when the next one looks."""
        if is_other.device.type == "cpu":
            if is_other:
                self._object(said)
        elif not is_capturing(is_other):
            self._doubt = Readback(is_other), said

    def settle_doubt(self) -> None:
        """Raise if the last collective found that the ranks do not do the same; waits for the device."""
        doubt, self._doubt = self._doubt, None
        if doubt is not None and doubt[0].wait():
            self._object(doubt[1])

    def _object(self, said: str) -> NoReturn:
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
        twin.__dict__.update(self.__dict__, _doubt=None)  # a process group cannot be copied, and need not be
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if self.ranks is not None:
            raise RuntimeError(
                "a process group cannot be pickled, and so neither can a scaler that has one: save its state_dict()"
            )
        return self.__dict__ | {"_doubt": None}


def _is_outside(ranks: object) -> bool:
    return ranks is torch.distributed.GroupMember.NON_GROUP_MEMBER


def _unpacked(packed: torch.Tensor, shift: int, expected: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a sum of flags * shift + digest: is any flag set, and are the digests not what is expected?"""
    return packed >= shift, packed % shift != expected
