"""An optimizer's gradients, in lists that one native op can process."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from castwise._torch_private import counted_version, stored_values, version
from castwise.amp import _sharded_gradients as shards
from castwise.amp import _torch_words as torch_words

if TYPE_CHECKING:
    from castwise.amp._agreement import Agreement

_HALF = (torch.float16, torch.complex32)
_DTYPES = (*_HALF, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_LAYOUTS = (torch.strided, torch.sparse_coo)
_USUAL = {(dtype, torch.strided) for dtype in (torch.float32, torch.bfloat16, torch.float64)}

_Kind: TypeAlias = tuple[torch.dtype, torch.layout, torch.device, type]
_kind_of = operator.attrgetter("dtype", "layout", "device", "__class__")


class Group(NamedTuple):
    """Gradients that one native op can process: of one device, one real dtype and one class."""

    device: torch.device
    dtype: torch.dtype
    """A real dtype, also for complex gradients."""
    params: list[torch.Tensor]
    tensors: list[torch.Tensor]
    """They share memory with the gradients: the stored values of a sparse one, a view (..., 2) of a complex one."""
    is_complex: bool
    shares: list[float] | None
    """What share of each tensor this rank counts: 1 / n if n ranks hold the same. None means all of it."""
    has_half: bool = False
    """Whether some tensors are 16-bit although `dtype` is fp32."""
    unrounded: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    """Returns the fp32 sum that the tensor of a parameter was rounded from; None if it was not."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of an optimizer at one moment, each tensor once, in the order of the parameters."""

    params: list[torch.Tensor]
    groups: list[Group]
    repeat: bool
    """Whether a gradient occurs more than once: a parameter is listed twice, or two parameters share a gradient."""
    share: float = 1.0
    """What share of all gradients this rank counts, multiplied by the shares of the groups."""

    def without(self, params: Container[torch.Tensor]) -> Gradients:
        """Return these gradients without those of the given parameters."""
        groups = []
        for group in self.groups:
            kept = [index for index, param in enumerate(group.params) if param not in params]
            if kept:
                shares = None if group.shares is None else [group.shares[index] for index in kept]
                of_kept = [group.params[index] for index in kept], [group.tensors[index] for index in kept]
                groups.append(Group(group.device, group.dtype, *of_kept, group.is_complex, shares))
        return Gradients([param for param in self.params if param not in params], groups, self.repeat, self.share)

    def only(self, params: Container[torch.Tensor]) -> Gradients:
        """Return only the gradients of the given parameters."""
        return self.without({param for param in self.params if param not in params})

    def measured_in_fp32(self, unrounded: Callable[[torch.Tensor], torch.Tensor | None]) -> Gradients:
        """Return these gradients with 16-bit and fp32 ones in one group, so that norms are added in parameter order.

        Args:
            unrounded: Returns the fp32 sum that a parameter's gradient was rounded from; None if it was not.
        """
        place = {id(param): index for index, param in enumerate(self.params)}
        by_kind = defaultdict[tuple[torch.device, torch.dtype, type, bool], list[Any]](list)
        for group in self.groups:
            dtype = torch.float32 if group.dtype.itemsize < 4 else group.dtype
            kind = (group.device, dtype, type(group.tensors[0]), group.is_complex)
            rows = len(group.params)
            of_group = [None] * rows if group.shares is None else group.shares
            by_kind[kind] += zip(group.params, group.tensors, of_group, [group.dtype] * rows, strict=True)
        groups = []
        for (device, dtype, _, is_complex), entries in by_kind.items():
            entries.sort(key=lambda entry: place[id(entry[0])])
            params, tensors, shares, dtypes = map(list, zip(*entries, strict=True))
            kept, has_half = None if None in shares else shares, {*dtypes} != {dtype}
            groups.append(Group(device, dtype, params, tensors, is_complex, kept, has_half, unrounded))
        return Gradients(self.params, groups, self.repeat, self.share)

    def has_fp16(self) -> bool:
        """Return True if a gradient is in fp16."""
        return any(group.dtype is torch.float16 for group in self.groups)

    def is_double(self) -> bool:
        """Return True if a gradient is in fp64."""
        return any(group.dtype is torch.float64 for group in self.groups)


def collect(
    optimizer: torch.optim.Optimizer,
    *,
    allow_fp16: bool,
    sum_duplicates: bool = False,
    allow_complex: bool = True,
    agreement: Agreement | None = None,
) -> Gradients:
    """Collect an optimizer's current gradients.

    Gradients that cannot be written in place (expanded, overlapping or lazily negated ones) are replaced with copies,
    and sparse fp16 gradients are coalesced. Both also change `.grad`.

    Args:
        optimizer: The optimizer.
        allow_fp16: Whether fp16 gradients are allowed.
        sum_duplicates: Coalesce all sparse gradients, whose norm is that of the summed duplicates.
        allow_complex: Whether complex gradients are allowed.
        agreement: The ranks that decide together; DTensors are then replaced with this rank's part.

    Raises:
        TypeError: `optimizer` is not an optimizer, or has a gradient of a dtype or layout that cannot be unscaled.
        ValueError: There are fp16 gradients, and they are not allowed.
    """
    params, grads = params_and_grads(optimizer)
    repeat = len(set(map(id, grads))) < len(grads)
    if repeat:
        first = {id(grad): (param, grad) for param, grad in zip(reversed(params), reversed(grads), strict=True)}
        params, grads = map(list, zip(*reversed(first.values()), strict=True))
    kinds = list(map(_kind_of, grads))
    distinct = _distinct(kinds)
    for kind in distinct:
        if kind[:2] not in _USUAL:
            _check_kind(kind, optimizer, params, kinds, allow_fp16, allow_complex)
        if kind[1] is torch.sparse_coo and (sum_duplicates or kind[0] in _HALF):
            for index, grad in enumerate(grads):
                if kinds[index] == kind:
                    grads[index] = params[index].grad = grad.coalesce()
    is_all_strided = len(distinct) == 1 and distinct[0][1] is torch.strided
    strided = grads if is_all_strided else [grad for grad in grads if grad.layout is torch.strided]
    if not all(map(torch.Tensor.is_contiguous, strided)) or any(map(torch.Tensor.is_neg, strided)):
        _make_writable(params, grads)
    if agreement is None or agreement.ranks_of_a_stage() == agreement.size() == 1:
        return Gradients(params, _grouped(params, grads, kinds, distinct), repeat)
    grads, shares = shards.local(params, grads, agreement.ranks_of_a_stage(), agreement.copies())
    kinds = list(map(_kind_of, grads))
    distinct = _distinct(kinds)
    if len(set(shares)) == 1:  # as in DDP
        return Gradients(params, _grouped(params, grads, kinds, distinct), repeat, shares[0])
    return Gradients(params, _grouped(params, grads, kinds, distinct, shares), repeat)


def params_and_grads(optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters that have a gradient, and these gradients.

    Raises:
        TypeError: `optimizer` has no `param_groups`, or they contain something other than tensors.
    """
    params = params_of(optimizer)
    try:
        tensors = [param.grad for param in params]
    except AttributeError:
        strange = next(param for param in params if not isinstance(param, torch.Tensor))
        ours = TypeError(f"an optimizer's parameters must be tensors, got {type(strange).__name__}")
        raise torch_words.error(ours, lambda: torch_words.unscale(strange)) from None
    grads = [tensor for tensor in tensors if tensor is not None]
    if len(grads) < len(params):
        params = [param for param, tensor in zip(params, tensors, strict=True) if tensor is not None]
    return params, grads


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters; raise a TypeError if it has no `param_groups`."""
    groups: list[dict[str, Any]] | None = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise TypeError(f"expected an optimizer with param_groups, got {type(optimizer).__name__}")
    return [param for group in groups for param in group["params"]]


def versions_of(tensors: list[torch.Tensor]) -> list[int]:
    """Return the version counter of each tensor."""
    try:
        return list(map(counted_version, tensors))
    except RuntimeError:  # inference tensors have no counter
        return list(map(version, tensors))


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return False for a tensor of a subclass, which may override torch's ops."""
    return type(tensor) in _PLAIN


def _check_kind(
    kind: _Kind,
    optimizer: torch.optim.Optimizer,
    params: list[torch.Tensor],
    kinds: list[_Kind],
    allow_fp16: bool,
    allow_complex: bool,
) -> None:
    dtype, layout, _, _ = kind
    if dtype not in _DTYPES or layout not in _LAYOUTS:
        name = _name(optimizer, params[kinds.index(kind)])
        raise TypeError(
            f"the gradient of {name} has dtype {dtype} and layout {layout}, which cannot be unscaled: use "
            f"{', '.join(map(str, _DTYPES))} in {', '.join(map(str, _LAYOUTS))}"
        )
    if dtype in _HALF and not allow_fp16:
        half = [_name(optimizer, param) for param, other in zip(params, kinds, strict=True) if other[0] in _HALF]
        advice = (
            "They may underflow once unscaled: keep the parameters in fp32 and let autocast choose fp16 op by op, or "
            f"allow them with GradScaler(..., allow_fp16_gradients=True). fp16 gradients: {', '.join(half)}"
        )
        if getattr(optimizer, "_steps_in_fp32", False):
            advice = "MasterWeights unscales in its step: to clip, call scaler.clip_grad_norm_(optimizer, ...) instead"
        ours = ValueError(advice)
        param = torch.zeros((), dtype=torch.float16)
        param.grad = torch.zeros_like(param)
        raise torch_words.error(ours, lambda: torch_words.unscale(param))
    if dtype.is_complex and not allow_complex:
        raise TypeError(
            "complex gradients cannot be clipped by value: the gradient of "
            f"{_name(optimizer, params[kinds.index(kind)])} is {dtype}; use clip_grad_norm_"
        )


def _distinct(kinds: list[_Kind]) -> list[_Kind]:
    """Return each kind once. Usually there is only one, and counting it takes half the time."""
    return kinds[:1] if kinds and kinds.count(kinds[0]) == len(kinds) else list(dict.fromkeys(kinds))


def _grouped(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    kinds: list[_Kind],
    distinct: list[_Kind],
    shares: list[float] | None = None,
) -> list[Group]:
    groups = []
    for kind in distinct:
        dtype, layout, device, _ = kind
        of_kind = (
            [index for index, other in enumerate(kinds) if other == kind] if len(distinct) > 1 else range(len(kinds))
        )
        tensors = [grads[index] for index in of_kind]
        if layout is torch.sparse_coo:
            tensors = [stored_values(tensor) for tensor in tensors]
        if dtype.is_complex:
            tensors = [torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor) for tensor in tensors]
            dtype = tensors[0].dtype
        shares_of_kind = None if shares is None else [shares[index] for index in of_kind]
        of_group = params if len(of_kind) == len(params) else [params[index] for index in of_kind]
        groups.append(Group(device, dtype, of_group, tensors, kind[0].is_complex, shares_of_kind))
    return groups


def _name(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> str:
    """Return a parameter's name if the optimizer knows it, otherwise its position."""
    for group_index, group in enumerate(optimizer.param_groups):
        for index, candidate in enumerate(group["params"]):
            if candidate is param:
                names = group.get("param_names")
                if isinstance(names, list) and index < len(names):
                    return str(names[index])
                return f"param_groups[{group_index}]['params'][{index}] of shape {tuple(param.shape)}"
    return f"a parameter of shape {tuple(param.shape)}"


def _make_writable(params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """Replace gradients that ops must not write to (expanded, overlapping or lazily negated ones) with copies."""
    for index, grad in enumerate(grads):
        if grad.layout is torch.strided and (grad.is_neg() or _overlaps(grad)):
            # The copy has its own memory, with the negation applied.
            grads[index] = params[index].grad = grad.clone(memory_format=torch.contiguous_format)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return True if elements may share memory: some stride does not exceed what the smaller strides span."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
