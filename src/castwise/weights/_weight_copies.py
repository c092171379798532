"""Copies of parameters in fewer bits, and the search for copies whose parameter has changed unnoticed.

A parameter has changed if its version, address, shape or strides have. Fused optimizers and some collectives do not
bump the version, so `WeightCache` is notified of both. Other such writes are found by comparing parameters with their
copies, one slice at a time.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from castwise._recipes.quantized_linear import quantize_weight
from castwise._recipes.scalings import Quantized, Scaling
from castwise._torch_private import is_fsdp_flattened, version, writes_to
from castwise.amp._readback import Readback

# The share of all parameters that is compared at a time, or bytes of one parameter if that is more.
_SHARE, _BYTES = 1 / 200, 1 << 16


class QuantizedBy(NamedTuple):
    """How the copy of a weight is quantized: as it is, or transposed, which can give other scales."""

    scaling: Scaling
    is_transposed: bool


LowPrecision = torch.dtype | QuantizedBy


class Copy:
    """A parameter's values in a low precision, at one version. `device` is "" if the parameter cannot be cached.

    Args:
        param: The parameter.
        dtype: The low precision, or how it is quantized.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "device",
        "dtype",
        "elements",
        "low",
        "low_elements",
        "param",
        "quantized",
        "shape",
        "strides",
        "version",
    )

    def __init__(self, param: torch.Tensor, dtype: LowPrecision) -> None:
        self.param, self.dtype, self.device = param, dtype, ""
        # Tensors created in inference mode could not be saved for a backward.
        with torch.inference_mode(False), torch.no_grad():
            # Read before the values, so that a concurrent write by another thread makes the copy stale.
            self.version, self.address = version(param), param.data_ptr()
            self.shape, self.strides = param.shape, param.stride()
            self.elements = self.low = param.detach()  # keeps the memory alive, so that its address is not reused
            self.quantized: Quantized | None = None
            if isinstance(dtype, QuantizedBy):
                if why_not(param, is_quantized=True) is None:
                    values, scale = quantize_weight(self.elements, *dtype)
                    self.device, self.low = param.device.type, values.bfloat16()  # which holds all of them
                    self.quantized = Quantized(self.low, scale)
            elif dtype in (torch.bfloat16, torch.float16) and why_not(param) is None:
                self.device, self.low = param.device.type, self.elements.to(dtype)
                self.elements, self.low_elements = _in_memory_order(self.elements), _in_memory_order(self.low)

    def is_current(self) -> bool:
        """Return True if the parameter has the same version, address, shape and strides.

        A write such as `param.data = param.data.t()` changes only the strides.
        """
        param = self.param
        return (
            self.version == writes_to(param)
            and self.address == param.data_ptr()
            and self.shape == param.shape
            and self.strides == param.stride()
        )

    def differs(self, start: int, stop: int) -> bool | torch.Tensor:
        """Return whether a range of elements in memory differs from the parameter; a tensor on an accelerator."""
        if isinstance(self.dtype, QuantizedBy):
            return self._is_quantized_otherwise(self.dtype)
        now, copied = self.elements, self.low_elements
        if stop - start < now.numel():
            now, copied = now[start:stop], copied[start:stop]
        now = now.to(copied.dtype)
        if self.device == "cpu":
            bits = torch.int64 if now.numel() % 4 == 0 else torch.int16  # the former takes a quarter of the time
            if torch.equal(now.view(bits), copied.view(bits)):
                return False
        differs = _differ(now, copied)
        return bool(differs) if self.device == "cpu" else differs

    def _is_quantized_otherwise(self, how: QuantizedBy) -> bool | torch.Tensor:
        """Return whether the parameter would be quantized differently now; all of it, as elements share scales."""
        assert self.quantized is not None
        now, kept = quantize_weight(self.elements, *how), self.quantized
        differs = _differ(now.values, kept.values) | _differ(now.scale, kept.scale)
        return bool(differs) if self.device == "cpu" else differs


def _differ(now: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """Return whether any elements differ; NaNs are equal, whatever their bits."""
    return ((now != copied) & ((now == now) | (copied == copied))).any()


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def why_not(param: torch.Tensor, is_quantized: bool = False) -> str | None:
    """Return why a parameter cannot be cached, or None if it can; 16-bit parameters can if the copy is quantized."""
    if type(param) is not nn.Parameter:
        return f"of the subclass {type(param).__name__}"
    if param.dtype is not torch.float32 and not (is_quantized and param.dtype in (torch.bfloat16, torch.float16)):
        return f"{param.dtype} and not torch.float32"
    if param.layout is not torch.strided or param.device.type == "meta":
        return f"{param.layout} on {param.device.type}"
    if not (param.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(param)):
        return "not dense in memory"
    if param.is_inference():
        return "created in inference mode, where writes are not counted"
    if is_fsdp_flattened(param):
        return "managed by FullyShardedDataParallel"
    return None


class Copies:
    """The copies of a model's parameters.

    Args:
        model: Returns the model, or None when it is gone.
        verify: As for `WeightCache`.
    """

    def __init__(self, model: Callable[[], nn.Module | None], verify: bool | str) -> None:
        self.model, self.verify, self.uses, self.casts = model, verify, 0, 0
        self.lock = threading.RLock()
        self.params_have_changed = False  # a layer has other parameters than at the last check
        # By the id of a parameter, which its copy keeps alive, as torch.utils.swap_tensors rejects weak references.
        self._known: weakref.WeakValueDictionary[tuple[int, LowPrecision], Copy] = weakref.WeakValueDictionary()
        # Copies still to compare in this round (the next one last), the first element, and how many bytes at a time.
        self._left: list[weakref.ref[Copy]] = []
        self._element = self._share = 0
        self._flags: deque[tuple[Readback, weakref.ref[Copy]]] = deque()  # pending results from accelerators

    def all(self) -> list[Copy]:
        """Return all copies."""
        return [copy for copy in list(self._known.values()) if copy.device]

    def find(self, param: torch.Tensor, dtype: LowPrecision) -> Copy:
        """Return a current copy of a parameter; the caller must keep it alive.

        Raises:
            RuntimeError: `verify` is True, and the parameter was changed in a way that leaves no trace.
        """
        with self.lock:
            copy = self._known.get((id(param), dtype))
            if copy is None or not copy.is_current():
                copy = self._known[id(param), dtype] = Copy(param, dtype)
                self.casts += bool(copy.device)
            elif self.verify is True and copy.device and copy.differs(0, copy.low.numel()):
                raise self._error(copy)
        return copy

    def invalidate(self, written: Iterable[torch.Tensor] | None = None) -> None:
        """Mark copies as stale: all of them, or those of parameters that share memory with the given tensors."""
        with self.lock:
            stale = self.all()
            if written is None:
                self._flags.clear()
            elif stale:
                memories = set(map(_memory_of, written))
                stale = [copy for copy in stale if _memory_of(copy.elements) in memories]
            for copy in stale:
                copy.version = -1

    def verify_some(self) -> None:
        """Compare the next parameters with their copies; results from an accelerator are read once they have arrived.

        Raises:
            RuntimeError: A parameter was changed in a way that leaves no trace.
        """
        while self._flags and self._flags[0][0].has_arrived:
            flag, find = self._flags.popleft()
            if flag.wait().item() and (copy := find()) is not None:
                raise self._error(copy)
        for copy, start, stop in self._next_slices():
            differs = copy.differs(start, stop)
            if differs is True:
                raise self._error(copy)
            if differs is not False:
                self._flags.append((Readback(differs), weakref.ref(copy)))

    def _next_slices(self) -> list[tuple[Copy, int, int]]:
        if not self._left:
            copies = self.all()
            self._left, self._element = [weakref.ref(copy) for copy in copies], 0
            self._share = int(sum(copy.elements.nbytes for copy in copies) * _SHARE)
        slices: list[tuple[Copy, int, int]] = []
        nbytes = self._share
        while self._left:
            copy, start = self._left[-1](), self._element
            if copy is not None and copy.is_current():
                end = copy.elements.numel()
                if slices and 4 * (end - start) > nbytes:
                    break
                stop = end if copy.quantized else min(end, start + max(nbytes, _BYTES) // 4)
                slices.append((copy, start, stop))
                nbytes -= 4 * (stop - start)
                if stop < end:
                    self._element = stop
                    break
            self._left.pop()
            self._element = 0
        return slices

    def _error(self, copy: Copy) -> RuntimeError:
        """Return the error for a stale copy, and invalidate all copies, because others may be stale too."""
        self.invalidate()
        model = self.model()
        named = [] if model is None else model.named_parameters(remove_duplicate=False)
        names = " = ".join(name for name, other in named if other is copy.param)
        return RuntimeError(
            f"the weight {names} was changed in a way that leaves no trace, such as a write through .data, and its old "
            "value may have been used since: call WeightCache.invalidate() after such a write"
        )


def _memory_of(tensor: torch.Tensor) -> int:
    # A subclass may have no storage.
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if is_plain else 0
