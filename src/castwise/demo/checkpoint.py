"""All that a run needs to continue from a step boundary, in one file.

One file, because two could not be replaced in one atomic step. It is torch's own format, which ignores what follows
its end and verifies no checksum of what comes before: a flipped bit would simply train on. So a line is appended
that says whose file this is and what it must hash to; `torch.load` still opens it.
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
    """Where a run stands.

    Args:
        results: One record per finished training, in order.
        trainer: State of the training under way, or None between two of them.
        metrics_bytes: Length of `metrics.jsonl` up to this step.
    """

    results: list[dict[str, Any]]  # plain values, so that weights_only loading accepts them
    trainer: dict[str, Any] | None  # tensors and plain values, for the same reason
    metrics_bytes: int


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint at `path` in one atomic step.

    Raises:
        UserError: The disk is full or the folder cannot be written to.
    """

    def write(file: IO[bytes]) -> None:
        torch.save(vars(checkpoint), file)
        file.write(_seal(file, file.tell()))

    write_atomically(path, write)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint, all tensors on the CPU; a missing file is a run stopped before its first.

    Raises:
        UserError: The file is truncated, damaged, or was written by something else or another version.
    """
    if not path.exists():
        return Checkpoint([], None, 0)
    refused = UserError(f"{path} is damaged or no checkpoint of castwise demo: delete it to start this run over")
    if not _is_sealed(path):
        raise refused
    try:
        read = Checkpoint(**torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # the seal is right, but anybody can make one, and torch raises what it likes
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
    """The last line for a file of `n_bytes` before it; leaves the file positioned there."""
    sha256 = hashlib.sha256()
    file.seek(0)
    for start in range(0, n_bytes, _CHUNK):
        sha256.update(file.read(min(_CHUNK, n_bytes - start)))
    return _SEAL % sha256.hexdigest().encode()
