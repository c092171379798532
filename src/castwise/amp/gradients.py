"""Which gradients an optimizer has, and in which lists native ops can take them.

Looking at 1,000 gradients one attribute at a time costs more than reading them. So a `Collector` asks for all that
matters in one C call a gradient, and keeps the grouping for as long as the answers are the same: a parameter that was
frozen or added, `set_to_none`, another dtype or layout give other answers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from castwise._torch_private import stored_values, version

_HALF = (torch.float16, torch.complex32)
_DTYPES = (*_HALF, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_LAYOUTS = (torch.strided, torch.sparse_coo)

_Kind: TypeAlias = tuple[torch.dtype, torch.layout, torch.device, type]
_kind_of = operator.attrgetter("dtype", "layout", "device", "__class__")


class Values(NamedTuple):
    """Values of gradients that one native call can take: one device, one real dtype, one class."""

    device: torch.device
    params: list[torch.Tensor]
    tensors: list[torch.Tensor]
    are_complex: bool
    """Whether the tensors are real views, of shape (..., 2)."""
    shares: list[float] | None
    """What part of each tensor is this rank's own to count: 1 / n if n ranks hold the same. None: all is."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of an optimizer at one moment, each tensor once, in the order of the parameters."""

    optimizer: torch.optim.Optimizer
    params: list[torch.Tensor]
    tensors: list[torch.Tensor]
    groups: dict[_Kind, list[int]]
    shares: list[float] | None = None
    repeat: bool = False
    """Whether a gradient is there more than once: of a parameter that is listed twice, or of two that share it."""

    def refuse_fp16(self) -> None:
        """Raise a ValueError that names them if there are fp16 gradients."""
        half = [self.name(index) for kind, group in self.groups.items() if kind[0] in _HALF for index in group]
        if half:
            raise ValueError(
                "Attempting to unscale FP16 gradients, which fp16 cannot hold unscaled: keep the parameters in fp32 "
                "and let autocast choose fp16 op by op, or allow it with GradScaler(..., allow_fp16_gradients=True). "
                f"fp16 gradients: {', '.join(half)}"
            )

    def refuse_complex(self) -> None:
        """Raise a TypeError that names the first if there are complex gradients."""
        for (dtype, _, _, _), group in self.groups.items():
            if dtype.is_complex:
                raise TypeError(
                    f"complex numbers have no order to clip them in: the gradient of {self.name(group[0])} is {dtype}; "
                    "use clip_grad_norm_"
                )

    def name(self, index: int) -> str:
        """Say which parameter a gradient belongs to: its name if the optimizer knows it, its place otherwise."""
        return _name(self.optimizer, self.params[index])

    def sum_duplicates(self, *, of_fp16_only: bool = False) -> Gradients:
        """Coalesce sparse gradients, in `.grad` as well: only sums of duplicates have a norm, and may overflow."""
        tensors = list(self.tensors)
        for (dtype, layout, _, _), group in self.groups.items():
            if layout is torch.sparse_coo and (dtype in _HALF or not of_fp16_only):
                for index in group:
                    tensors[index] = self.params[index].grad = tensors[index].coalesce()
        return replace(self, tensors=tensors)

    def part(self, chosen: list[int]) -> Gradients:
        """Return these gradients without those that are not chosen."""
        places = {index: place for place, index in enumerate(chosen)}
        groups = {
            kind: kept
            for kind, group in self.groups.items()
            if (kept := [places[index] for index in group if index in places])
        }
        shares = None if self.shares is None else [self.shares[index] for index in chosen]
        params, tensors = [self.params[index] for index in chosen], [self.tensors[index] for index in chosen]
        return Gradients(self.optimizer, params, tensors, groups, shares)

    def values(self) -> Iterator[Values]:
        """Yield the values in lists that share memory with the gradients.

        Of a sparse gradient these are its stored values, of a complex one its real view of shape (..., 2).
        """
        for (dtype, layout, device, _), group in self.groups.items():
            params, tensors, shares = self.params, self.tensors, self.shares
            if len(group) < len(tensors):
                params, tensors = [params[index] for index in group], [tensors[index] for index in group]
                shares = None if shares is None else [shares[index] for index in group]
            if layout is torch.sparse_coo:
                tensors = [stored_values(tensor) for tensor in tensors]
            if dtype.is_complex:
                tensors = [torch.view_as_real(t.conj() if t.is_conj() else t) for t in tensors]
            yield Values(device, params, tensors, dtype.is_complex, shares)


class Collector:
    """Finds the gradients of one optimizer, and remembers how they are grouped while they are of the same kinds."""

    def __init__(self) -> None:
        self._kinds: list[_Kind] = []
        self._groups: dict[_Kind, list[int]] = {}

    def __call__(self, optimizer: torch.optim.Optimizer) -> Gradients:
        """Collect the gradients there are now; ones that cannot be written in place are replaced by copies.

        Raises:
            TypeError: `optimizer` is not one, or has a gradient of a dtype or layout that cannot be unscaled.
        """
        params, grads = present(optimizer)
        is_repeated = repeat(grads)
        if is_repeated:
            once = {id(grad): (param, grad) for param, grad in zip(reversed(params), reversed(grads), strict=True)}
            params, grads = map(list, zip(*reversed(once.values()), strict=True))
        kinds = list(map(_kind_of, grads))
        if kinds != self._kinds:
            self._groups = _grouped(optimizer, params, kinds)
            self._kinds = kinds
        _make_writable(params, grads, self._groups)
        return Gradients(optimizer, params, grads, self._groups, repeat=is_repeated)


def present(optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters that have a gradient, and those gradients.

    Raises:
        TypeError: `optimizer` has no `param_groups`, or something other than a tensor in them.
    """
    params = params_of(optimizer)
    try:
        tensors = [param.grad for param in params]
    except AttributeError:
        strange = next(param for param in params if not isinstance(param, torch.Tensor))
        raise TypeError(f"an optimizer's parameters are tensors, got {type(strange).__name__}") from None
    grads = [tensor for tensor in tensors if tensor is not None]
    if len(grads) < len(params):
        params = [param for param, tensor in zip(params, tensors, strict=True) if tensor is not None]
    return params, grads


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """List an optimizer's parameters; raise a TypeError if it has no `param_groups`."""
    groups: list[dict[str, Any]] | None = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise TypeError(f"expected an optimizer with param_groups, got {type(optimizer).__name__}")
    return [param for group in groups for param in group["params"]]


class Contents:
    """Some gradients at one moment. They are kept alive, so that no other one can come to stand for them.

    Args:
        grads: As they are now.
    """

    def __init__(self, grads: list[torch.Tensor]) -> None:
        self._grads, self._versions = list(grads), list(map(version, grads))

    def hold(self, grad: torch.Tensor | None) -> bool:
        """Say whether a gradient is one of these, written to or not."""
        return any(grad is one for one in self._grads)

    def are(self, grads: list[torch.Tensor]) -> bool:
        """Say whether gradients are these, and were neither written to nor replaced since."""
        return (
            len(grads) == len(self._grads)
            and all(map(operator.is_, grads, self._grads))
            and list(map(version, grads)) == self._versions
        )


def repeat(grads: list[torch.Tensor]) -> bool:
    """Say whether a gradient is there more than once."""
    return len(set(map(id, grads))) < len(grads)


def are_contiguous(grads: list[torch.Tensor]) -> bool:
    """Say whether no gradient needs a copy that can be written to; sparse ones count as if they did."""
    try:
        return all(map(torch.Tensor.is_contiguous, grads))
    except RuntimeError:
        return False


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is not of a subclass, for which torch's ops may mean something else."""
    return type(tensor) in _PLAIN


def are_real_on_cpu(tensors: list[torch.Tensor]) -> bool:
    """Say whether all tensors are plain, dense, on a CPU and of floating-point numbers."""
    return all(
        kind in _PLAIN and device.type == "cpu" and layout is torch.strided and dtype.is_floating_point
        for dtype, layout, device, kind in set(map(_kind_of, tensors))
    )


def regroup(tensors: list[torch.Tensor]) -> dict[_Kind, list[int]]:
    """Return which of some gradients are of one kind."""
    groups: dict[_Kind, list[int]] = {}
    for index, kind in enumerate(map(_kind_of, tensors)):
        groups.setdefault(kind, []).append(index)
    return groups


def _grouped(
    optimizer: torch.optim.Optimizer, params: list[torch.Tensor], kinds: list[_Kind]
) -> dict[_Kind, list[int]]:
    groups: dict[_Kind, list[int]] = {}
    for index, kind in enumerate(kinds):
        dtype, layout, _, _ = kind
        if dtype not in _DTYPES or layout not in _LAYOUTS:
            raise TypeError(
                f"the gradient of {_name(optimizer, params[index])} has dtype {dtype} and layout {layout}; what can be "
                f"unscaled is {', '.join(map(str, _DTYPES))} in {', '.join(map(str, _LAYOUTS))}"
            )
        groups.setdefault(kind, []).append(index)
    return groups


def _name(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> str:
    for group_index, group in enumerate(optimizer.param_groups):
        for index, candidate in enumerate(group["params"]):
            if candidate is param:
                names = group.get("param_names")
                if isinstance(names, list) and index < len(names):
                    return str(names[index])
                return f"param_groups[{group_index}]['params'][{index}] of shape {tuple(param.shape)}"
    return f"a parameter of shape {tuple(param.shape)}"


def _make_writable(params: list[torch.Tensor], grads: list[torch.Tensor], groups: dict[_Kind, list[int]]) -> None:
    """Put copies in the place of gradients that no op may write to: expanded, overlapping or lazily negated ones."""
    for (_, layout, _, _), group in groups.items():
        if layout is not torch.strided:
            continue
        for index in group:
            grad = grads[index]
            if grad.is_contiguous() and not grad.is_neg():
                continue
            if grad.is_neg() or _overlaps(grad):
                # A copy has memory of its own, and the negation is done in it.
                grads[index] = params[index].grad = grad.clone(memory_format=torch.contiguous_format)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Say whether elements may share memory: some step is shorter than what the smaller steps reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
