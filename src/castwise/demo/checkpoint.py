"""Checkpoints: one file with everything a run needs to continue from a step boundary.

There is one file because two cannot be replaced atomically. It uses torch's format, which verifies no checksum and
ignores trailing bytes. A line with a program name and a hash is appended, so that a flipped bit is detected;
`torch.load` can still open the file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from castwise._user_error import UserError
from castwise.demo.run_folder import write_atomically

_CHUNK = 2**20
_SEAL = b"\ncastwise demo 1 sha256 %s\n"
_SEAL_LENGTH = len(_SEAL % bytes(64))


@dataclass(frozen=True)
class Checkpoint:
    """The progress of a run.

    Args:
        results: One record per finished training run, in order.
        trainer: State of the current training run, or None between two of them.
        metrics_bytes: Length of `metrics.jsonl` up to this step.
    """

    results: list[dict[str, Any]]  # plain values, so that weights_only loading accepts them
    trainer: dict[str, Any] | None  # tensors and plain values, for the same reason
    metrics_bytes: int


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint at `path` atomically.

    Raises:
        UserError: The disk is full or the folder cannot be written to.
    """

    def write(file: IO[bytes]) -> None:
        torch.save(vars(checkpoint), file)
        file.write(_seal(file, file.tell()))

    write_atomically(path, write)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint with all tensors on the CPU; a missing file means that the run stopped before its first.

    Raises:
        UserError: The file is truncated or damaged, or was written by another program or version.
    """
    if not path.exists():
        return Checkpoint([], None, 0)
    refused = UserError(f"{path} is damaged or not a checkpoint of castwise demo: delete it to start this run over")
    if not _is_sealed(path):
        raise refused
    try:
        read = Checkpoint(**torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # a valid seal can be forged, and torch.load raises many types
        raise refused from error
    if not _are_fields(read):
        raise refused
    return read


def _are_fields(read: Checkpoint) -> bool:
    return (
        isinstance(read.results, list)
        and all(isinstance(each, dict) for each in read.results)
        and (read.trainer is None or isinstance(read.trainer, dict))
        and type(read.metrics_bytes) is int
        and read.metrics_bytes >= 0
    )


def _is_sealed(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return _seal(file, path.stat().st_size - _SEAL_LENGTH) == file.read()
    except OSError:
        return False


def _seal(file: IO[bytes], n_bytes: int) -> bytes:
    """Return the seal for the first `n_bytes` of a file, and leave the file positioned after them."""
    sha256 = hashlib.sha256()
    file.seek(0)
    for start in range(0, n_bytes, _CHUNK):
        sha256.update(file.read(min(_CHUNK, n_bytes - start)))
    return _SEAL % sha256.hexdigest().encode()
