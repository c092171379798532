"""Tensors in a file of the safetensors format: a JSON header and bytes, which no code has to be run to read.

The format is described at https://github.com/huggingface/safetensors: eight bytes with the length of the header, the
header with dtype, shape and offsets of each tensor, and their bytes, little-endian and without gaps.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from castwise import _files

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 2**26
_PIECE = 2**24  # bytes that are written at once


class Contents(NamedTuple):
    """What a file holds: texts by name, and tensors by name, on the CPU."""

    texts: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]


def can_hold(tensor: torch.Tensor) -> bool:
    """Return True if a file can hold a tensor: strided, and of a dtype that the format knows."""
    return tensor.dtype in _NAMES and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def write(path: Path, contents: Contents) -> None:
    """Write a new file that only its owner can read. It gets its name when it is complete.

    Raises:
        FileExistsError: There is a file of this name. It is left as it is.
        OSError: The file cannot be written. Nothing is left of it.
        ValueError: The byte order of this machine is not the format's.
    """
    if sys.byteorder != "little":
        raise ValueError("tensors are written as little-endian bytes, and this machine is big-endian")
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists")
    header: dict[str, Any] = {"__metadata__": dict(contents.texts)}
    end = 0
    for name, tensor in contents.tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    aside, file = _files.open_aside(path.parent, 0o600)
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            for tensor in contents.tensors.values():
                for piece in _bytes_of(tensor):
                    opened.write(piece)
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def read(path: Path) -> Contents:
    """Read a file. Takes as much memory as the file is large.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not such a file, or is not complete.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
            raise ValueError("it is not a safetensors file, or is not complete")
        header = _header(file.read(length))
        data = bytearray(file.read(size - 8 - length))
    texts = header.pop("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("its metadata are not texts")
    return Contents(texts, {name: _tensor(name, entry, data) for name, entry in header.items()})


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("its header is not JSON") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    return header


def _tensor(name: str, entry: Any, data: bytearray) -> torch.Tensor:
    try:
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        are_counts = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the entry of {name!r} in its header is not a tensor's") from None
    if not are_counts or end > len(data) or math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"the shape of {name!r} does not fit its bytes")
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    # A copy, because offsets may not be multiples of the item size.
    values = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=begin).clone()
    return (values.bool() if dtype is torch.bool else values.view(dtype)).reshape(shape)


def _bytes_of(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield the bytes of a tensor, without numpy, which may not be installed."""
    values = tensor.detach().cpu().contiguous()
    for begin in range(0, values.nbytes, _PIECE):
        size = min(_PIECE, values.nbytes - begin)
        yield (ctypes.c_char * size).from_address(values.data_ptr() + begin)
