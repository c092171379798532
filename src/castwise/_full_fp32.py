"""Full fp32 for references: products and convolutions without TF32 or bf16, whatever the program has set.

The settings belong to the process, so other threads compute in full fp32 as well while a reference runs. If several
threads run references at once, the last one that entered decides; when all have left, the program's settings are back.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import backends

_CUDNN: Any = backends.cudnn
_MKLDNN: Any = backends.mkldnn
_FULL = ("ieee", "none")  # "none" is torch's default, and computes as "ieee" does
_LOCK = threading.RLock()
_ACTIVE: list[list[bool]] = []  # in the order of entering: [True] for full fp32, [False] for the program's settings
_before: list[_Settings] = []  # the program's settings, while others apply


class _Settings:
    """Sets full fp32, and remembers what was set before.

    Torch has an older and a newer interface to the same settings. Once they contradict each other, reading the older
    one raises. Therefore the older one is set first, unless the program itself has mixed them.
    """

    def __init__(self) -> None:
        self.of_ops = [op.fp32_precision for op in _ops()]
        self._backends: list[tuple[Any, Any]] = []
        self._products = self._cudnn = None
        self._xpu = torch.xpu.is_available() and _MKLDNN.allow_tf32
        with suppress(RuntimeError):  # the two interfaces were mixed
            self._products = torch.get_float32_matmul_precision()
        with suppress(RuntimeError):
            self._cudnn = _CUDNN.allow_tf32
        try:
            if self._products not in (None, "highest"):
                torch.set_float32_matmul_precision("highest")
            if self._cudnn:
                _assign(_CUDNN, "allow_tf32", False)
            for backend in (backends, _CUDNN, _MKLDNN):
                value = backend.fp32_precision
                if value not in _FULL:  # now that those above it are set, its own
                    self._backends.append((backend, value))
                    _set(backend, "ieee")
            if self._xpu:
                _MKLDNN.set_flags(None, None, False, None)
            for op in _ops():
                if op.fp32_precision not in _FULL:
                    op.fp32_precision = "ieee"
        except BaseException:
            self.put_back()
            raise

    def put_back(self) -> None:
        """Set what was set before."""
        for backend, value in reversed(self._backends):
            _set(backend, value)
        if self._cudnn:
            _assign(_CUDNN, "allow_tf32", True)
        if self._products not in (None, "highest"):
            torch.set_float32_matmul_precision(self._products)
        if self._xpu:
            _MKLDNN.set_flags(None, None, True, None)
        for op, value in zip(_ops(), self.of_ops, strict=True):  # setting `self._products` sets others as well
            if op.fp32_precision != value:
                op.fp32_precision = value


def _ops() -> tuple[Any, ...]:
    return backends.cuda.matmul, _CUDNN.conv, _CUDNN.rnn, _MKLDNN.matmul, _MKLDNN.conv, _MKLDNN.rnn


def _set(backend: Any, value: str) -> None:
    if backend is _MKLDNN:  # whose attribute sets that of all backends, in torch 2.13
        backend.set_flags(None, None, None, value)
    else:
        _assign(backend, "fp32_precision", value)


def _assign(backend: Any, name: str, value: object) -> None:
    """Set an attribute, unless `torch.backends.disable_global_flags()` has frozen it; those of ops are set anyway."""
    with suppress(RuntimeError):
        setattr(backend, name, value)


@contextmanager
def _entered(is_full: bool) -> Iterator[None]:
    entry = [is_full]
    try:
        with _LOCK:
            _ACTIVE.append(entry)
            _update()
        yield
    finally:
        with _LOCK:
            _ACTIVE[:] = [other for other in _ACTIVE if other is not entry]
            _update()


def _update() -> None:
    is_full = bool(_ACTIVE) and _ACTIVE[-1][0]
    if is_full is bool(_before):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some releases of torch warn that the older interface is deprecated
        if is_full:
            _before.append(_Settings())
        else:
            _before.pop().put_back()


def full_fp32() -> AbstractContextManager[None]:
    """Return a context in which fp32 products and convolutions are computed in fp32."""
    return _entered(True)


def programs_fp32() -> AbstractContextManager[None]:
    """Return a context, for use inside `full_fp32`, in which the program's settings apply."""
    return _entered(False) if _ACTIVE else nullcontext()


def full_fp32_products() -> AbstractContextManager[None]:
    """Return `full_fp32()`, or a context that does nothing if matrix products are computed in full fp32 anyway."""
    is_full = backends.cuda.matmul.fp32_precision in _FULL and _MKLDNN.matmul.fp32_precision in _FULL
    return nullcontext() if is_full else full_fp32()


def is_reduced(device: str) -> bool:
    """Return True if the program has fp32 ops of a device computed with less.

    Args:
        device: The `type` of the device.
    """
    with _LOCK:
        values = _before[0].of_ops if _before else [op.fp32_precision for op in _ops()]
    asked = {"cuda": values[:3], "cpu": values[3:]}.get(device, values)
    return any(value not in _FULL for value in asked)
