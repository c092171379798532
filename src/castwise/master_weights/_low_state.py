"""Optimizer state that is stored in 8 or 16 bits, and lent to the optimizer in fp32, a bucket at a time.

In 8 bits, 256 numbers share an fp32 scale, the largest of their magnitudes. A code k stands for scale * (k / 127)^4,
with the sign of k, or for scale * (k / 255)^8 if the state is never negative, as second moments are. Adam divides by a
second moment's square root, so powers keep what linear codes would round to 0: numbers down to 4e-9 and 6e-20 of the
largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from castwise.master_weights._buckets import (
    Bucket,
    BucketViews,
    Loan,
    Segment,
    as_dtensor,
    flat,
    is_dtensor,
    laid_out_as,
    local,
    rounded_up,
)
from castwise.master_weights._codecs import Chance

Created = dict[torch.Tensor, dict[Any, Any]]
"""State that an optimizer creates in this step for weights that are cut, by parameter and name.

It is kept apart until the last part is stepped: what an optimizer does with a part depends on the state that it finds,
so each part must find what the first one found.
"""

BLOCK = 256  # numbers that share a scale, as in the 8-bit optimizers of Dettmers et al., 2022
_TOP = {torch.int8: 127.0, torch.uint8: 255.0}
_SQUARINGS = {torch.int8: 2, torch.uint8: 3}
# Less than one, so that a number that a code stands for gets this code again, whatever the random bits.
_SPREAD = (1.0 - 2.0**-7) * 2.0**-32


class Blockwise:
    """State of a weight on this rank, in 8-bit codes with a scale for each block of 256.

    Args:
        codes: int8 for signed state, or uint8; flat, in the memory order of the weight, padded to full blocks.
        scales: fp32, one for each block.
    """

    __slots__ = ("codes", "scales")

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def zeros(cls, param: torch.Tensor, dtype: torch.dtype) -> Blockwise:
        """Return the state 0 of a parameter."""
        here = local(param)
        length = rounded_up(here.numel(), BLOCK)
        codes = torch.zeros(length, dtype=dtype, device=here.device)
        return cls(codes, torch.zeros(length // BLOCK, device=here.device))

    @classmethod
    def of(cls, values: torch.Tensor, param: torch.Tensor, dtype: torch.dtype) -> Blockwise:
        """Return the nearest state to the values, which have the shape of the parameter."""
        state, here = cls.zeros(param, dtype), local(param)
        fp32 = torch.zeros(len(state.codes), device=here.device)
        fp32[: here.numel()].copy_(flat(laid_out_as(local(values).to(here.device, torch.float32), here)))
        encode(fp32, None, state.codes, state.scales, torch.empty_like(fp32))
        return state

    def fp32(self, param: torch.Tensor) -> torch.Tensor:
        """Return the state in fp32, with the shape and strides of its parameter."""
        here = local(param)
        values = decode(self.codes, self.scales, torch.empty(len(self.codes), device=self.codes.device))
        return as_dtensor(values[: here.numel()].as_strided(here.shape, here.stride()), param)

    @property
    def nbytes(self) -> int:
        """The memory of the codes and scales, in bytes."""
        return self.codes.nbytes + self.scales.nbytes

    def parts_of(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes and the scales of a segment."""
        begin, end = segment.start // BLOCK, rounded_up(segment.start + segment.length, BLOCK) // BLOCK
        return self.codes[begin * BLOCK : end * BLOCK], self.scales[begin:end]


def decode(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the numbers that codes stand for to `out`, and return it; all are flat, in full blocks."""
    out.copy_(codes).div_(_TOP[codes.dtype])
    for _ in range(_SQUARINGS[codes.dtype]):
        out.square_()
    if codes.dtype is torch.int8:
        out.copysign_(codes)
    out.view(-1, BLOCK).mul_(scales[:, None])
    return out


def encode(
    values: torch.Tensor,
    random: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Write the codes and scales of numbers. A block with an inf or NaN is not finite when it is decoded.

    Args:
        values: fp32; like all tensors flat, in full blocks.
        random: 32 random bits for each number, which round the root stochastically; None to round it to nearest.
        codes: int8 or uint8, for numbers that are not negative.
        scales: fp32, one for each block.
        scratch: fp32 memory.
    """
    blocks = values.view(-1, BLOCK)
    torch.amax(torch.abs(blocks, out=scratch.view(-1, BLOCK)), 1, out=scales)
    scratch.view(-1, BLOCK).div_(torch.where(scales == 0.0, 1.0, scales)[:, None])
    for _ in range(_SQUARINGS[codes.dtype]):
        scratch.sqrt_()
    scratch.mul_(_TOP[codes.dtype])
    if codes.dtype is torch.int8:
        # A first moment must not be rounded up from 0 to a number that is many times its second moment's root.
        torch.threshold_(scratch, 1.0 - 2.0**-8, 0.0)
    if random is not None:
        scratch.add_(random, alpha=_SPREAD)
    scratch.add_(0.5)  # the conversion to integers rounds down
    if codes.dtype is torch.int8:
        scratch.copysign_(values)
    codes.copy_(scratch)


@dataclass(slots=True)
class LowState:
    """State that is stored in 8 or 16 bits and lent in fp32."""

    dtypes: dict[str, torch.dtype]
    """By state name; int8 and uint8 stand for blocks."""
    nearest: set[str]
    """Names of state that is rounded to nearest instead of stochastically."""
    chance: Chance

    def names(self) -> list[str]:
        """Return the names of state that is lent from other memory."""
        return [name for name, dtype in self.dtypes.items() if dtype.itemsize < 4]

    def has_blocks(self) -> bool:
        """Return True if any state is stored in blocks, which no two weights may share."""
        return any(dtype in _TOP for dtype in self.dtypes.values())

    def stored(self, of_param: Mapping[Any, Any], param: torch.Tensor) -> dict[Any, Any]:
        """Return the state of a 16-bit weight as it is stored, with the strides of the weight."""
        return {name: self._stored(name, value, param) for name, value in of_param.items()}

    def _stored(self, name: object, value: Any, param: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.dim():
            return value
        if value.shape != param.shape:
            return value.float() if value.dtype.itemsize < 4 else value
        dtype = self.dtypes.get(str(name), torch.float32)
        if dtype in _TOP:
            return Blockwise.of(value, param, dtype)
        stored = value.to(dtype)
        return stored if is_dtensor(param) else laid_out_as(stored, local(param))

    def lend(self, views: BucketViews, loans: list[Loan], state: Mapping[Any, Any]) -> None:
        """Write the stored state of a bucket's loans to their memory for it.

        Args:
            views: The views of the bucket.
            loans: Those of its loans that are lent.
            state: The state of the optimizer, by parameter.
        """
        for name, memory in views.low_states.items():
            there = [(loan, state[loan.segment.weight.param][name]) for loan in loans if self._has(name, state, loan)]
            if self.dtypes[name] in _TOP:
                _decode_all(there, memory, views)
            elif there:
                to = [loan.low_states[name] for loan, _ in there]
                torch._foreach_copy_(to, [_part(stored, loan.segment) for loan, stored in there])

    def _has(self, name: str, state: Mapping[Any, Any], loan: Loan) -> bool:
        param = loan.segment.weight.param
        return self.is_stored(state.get(param, {}).get(name), param)

    def is_stored(self, value: Any, param: torch.Tensor) -> bool:
        """Return True if a value is state of a weight that is lent from other memory."""
        return isinstance(value, Blockwise) or (is_of_weight(value, param) and value.dtype.itemsize < 4)

    def store(self, bucket: Bucket, views: BucketViews, given: Mapping[str, list[tuple[Loan, Any, Any]]]) -> None:
        """Store the state of a bucket.

        Args:
            bucket: The bucket.
            views: Its views.
            given: By name, loans with their state in fp32 and the tensor or `Blockwise` to store it in.
        """
        for name, members in given.items():
            stream = stream_of(name, bucket)
            moved = [(loan.low_states[name], local(value)) for loan, value, _ in members]
            moved = [(here, value) for here, value in moved if here.data_ptr() != value.data_ptr()]
            if moved:
                torch._foreach_copy_([here for here, _ in moved], [value for _, value in moved])
            values = views.low_states[name]
            if self.dtypes[name] in _TOP:
                random = self.chance.words(len(values), values.device, stream)
                _encode_all([(loan, stored) for loan, _, stored in members], values, random, views)
                continue
            to = [_part(stored, loan.segment) for loan, _, stored in members]
            if name not in self.nearest:
                memory = views.weights.view(self.dtypes[name])  # those of gradients, which have been used
                values = self.chance.rounded(values[: len(memory)], memory, stream)
            of_loans = [
                loan.segment.bucket_view(values).as_strided(part.shape, part.stride())
                for (loan, _, _), part in zip(members, to, strict=True)
            ]
            torch._foreach_copy_(to, of_loans)

    def empty(self, name: str, loan: Loan, value: torch.Tensor) -> Any:
        """Return what to store new state of a loan's weight in."""
        param, dtype = loan.segment.weight.param, self.dtypes.get(name, value.dtype)
        if dtype in _TOP:
            return Blockwise.zeros(param, dtype)
        return torch.empty_like(param.detach(), dtype=dtype)


def stream_of(name: str, bucket: Bucket) -> str:
    """Return the name of the random stream that rounds a bucket's state."""
    first = bucket.segments[0]
    return f"{name} of {first.weight.name} from {first.start}"


def _part(stored: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Return a segment's part of state: flat if the weight is cut."""
    here = local(stored)
    return segment.view_of(here) if segment.weight.is_cut else here


def _padded(segment: Segment, memory: torch.Tensor) -> torch.Tensor:
    return memory[segment.offset : segment.offset + rounded_up(segment.length, BLOCK)]


def _blocks(segment: Segment, memory: torch.Tensor) -> torch.Tensor:
    return memory[segment.offset // BLOCK : (segment.offset + rounded_up(segment.length, BLOCK)) // BLOCK]


def _decode_all(there: list[tuple[Loan, Blockwise]], memory: torch.Tensor, views: BucketViews) -> None:
    """Decode the state of loans; what other segments and gaps have becomes 0, which no code and no scale depends on."""
    if not there:
        memory.zero_()
        return
    dtype = there[0][1].codes.dtype
    if len(there) == 1 and len(memory) == len(_padded(there[0][0].segment, memory)):
        codes, scales = there[0][1].parts_of(there[0][0].segment)
    else:
        codes, scales = views.codes.zero_().view(dtype), views.scales.zero_()
        _copy_blocks([(_padded(loan.segment, codes), _blocks(loan.segment, scales), loan, it) for loan, it in there])
    decode(codes, scales, memory)


def _copy_blocks(pairs: list[tuple[torch.Tensor, torch.Tensor, Loan, Blockwise]], *, is_back: bool = False) -> None:
    ours = [codes for codes, _, _, _ in pairs], [scales for _, scales, _, _ in pairs]
    parts = [stored.parts_of(loan.segment) for _, _, loan, stored in pairs]
    stored = [codes for codes, _ in parts], [scales for _, scales in parts]
    for here, there in zip(ours, stored, strict=True):
        torch._foreach_copy_(there, here) if is_back else torch._foreach_copy_(here, there)


def _encode_all(
    members: list[tuple[Loan, Blockwise]], values: torch.Tensor, random: torch.Tensor, views: BucketViews
) -> None:
    dtype = members[0][1].codes.dtype
    if len(members) == 1 and len(values) == len(_padded(members[0][0].segment, values)):
        codes, scales = members[0][1].parts_of(members[0][0].segment)
        encode(values, random, codes, scales, views.scratch)
        return
    codes, scales = views.codes.view(dtype), views.scales
    encode(values, random, codes, scales, views.scratch)
    pairs = [(_padded(loan.segment, codes), _blocks(loan.segment, scales), loan, stored) for loan, stored in members]
    _copy_blocks(pairs, is_back=True)


def is_of_weight(value: Any, weight: torch.Tensor) -> bool:
    """Return True if a value is elementwise state of a weight."""
    return (
        isinstance(value, torch.Tensor)
        and value.shape == weight.shape
        and value.is_floating_point()
        and value.dim() > 0
    )


def in_fp32(of_param: Mapping[Any, Any], param: torch.Tensor) -> dict[Any, Any]:
    """Return the state of a parameter with state in blocks as fp32 tensors."""
    return {name: value.fp32(param) if isinstance(value, Blockwise) else value for name, value in of_param.items()}


def nbytes(values: Iterable[Any]) -> int:
    """Return the memory of state on this rank, in bytes."""
    return sum(
        local(value).nbytes if isinstance(value, torch.Tensor) else value.nbytes
        for value in values
        if isinstance(value, (torch.Tensor, Blockwise))
    )
