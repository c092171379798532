"""What a process found, as text that can be compared with that of another: a tensor is its dtype, shape and bits."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

FACTS: dict[str, str] = {}


def put(name: str, value: Any) -> None:
    """Note a value: a tensor, whatever holds tensors, or text."""
    tensors = [leaf for leaf in tree_leaves(_fields(value)) if isinstance(leaf, Tensor)]
    if tensors and not isinstance(value, Tensor):
        for i, tensor in enumerate(tensors):
            FACTS[f"{name}[{i}]"] = shown(tensor)
    else:
        FACTS[name] = shown(value) if tensors else str(value)


def shown(tensor: Tensor) -> str:
    """Return the dtype, the shape, the mean and a hash of the bits of a tensor."""
    with torch.no_grad():
        plain = _parts(tensor)
        finite = [part.double().mean().item() for part in plain if part.numel() and not part.is_complex()]
    mean = f"{math.fsum(finite) / len(finite):.6g}" if finite else "-"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} mean {mean} bits {digest([tensor])}"


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bits of tensors, also of subclasses and of parts of sharded ones."""
    result = hashlib.blake2b(digest_size=8)
    with torch.no_grad():
        for tensor in tensors:
            result.update(str((tensor.dtype, tuple(tensor.shape))).encode())
            for part in _parts(tensor):
                result.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def save(path: Path) -> None:
    """Write all facts to a file."""
    path.write_text(json.dumps(FACTS))


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that one consists of."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]
    return [tensor.detach().resolve_conj().resolve_neg().cpu()]


def _fields(value: Any) -> Any:
    """Return containers of a library's own class, such as ModelOutput, as those that torch knows."""
    if isinstance(value, Mapping):
        return {key: _fields(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_fields(item) for item in value]
    return value
