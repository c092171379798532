"""Text as bytes, and batches of it.

Runs are compared bit for bit, so files are read in a fixed order, and a batch depends only on the seed and the step.
Reading stops at `LIMIT`, so that the demo can handle folders of any size.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from castwise._demo.gpt import Size
from castwise._user_error import UserError

LIMIT = 4 * 2**20
VALIDATION_SHARE = 20  # one byte in this many is held out
# Installed packages and test suites differ between machines that have the same Python.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests"})


class Corpus:
    """Bytes to train on and a held-out tail for validation.

    Args:
        text: All bytes, at least `2 * (context + 1)` of them.
        context: Length of the longest sequence.

    Example:
        >>> corpus = Corpus(bytes(range(256)), context=4)
        >>> tokens, targets = corpus.batch(Size(1, 1, 8, context=4, batch=2), seed=0, step=7)
        >>> tokens.shape, bool((targets == tokens + 1).all())
        (torch.Size([2, 4]), True)
    """

    def __init__(self, text: bytes, context: int) -> None:
        needed = 2 * (context + 1)
        if len(text) < needed:
            raise UserError(
                f"needs at least {needed} bytes of text (a context of {context} to train on, another to validate), "
                f"got {len(text)}: use --data with more text"
            )
        self.n_bytes = len(text)
        held_out = max(context + 1, len(text) // VALIDATION_SHARE)
        everything = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._train, self._validation = everything[:-held_out], everything[-held_out:]

    def batch(self, size: Size, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return the training sequences of a step, which are the same on every call.

        Returns:
            Tokens and the tokens that follow them, each of shape (batch, context), int64, on the CPU.
        """
        generator = torch.Generator().manual_seed(derive_seed(seed, f"step {step}"))
        starts = torch.randint(len(self._train) - size.context, (size.batch,), generator=generator)
        return _sequences(self._train, starts, size.context)

    def validation(self, size: Size, n_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield evenly spaced sequences of the held-out tail, in batches shaped like those of `batch`."""
        last = len(self._validation) - size.context - 1
        starts = torch.linspace(0, last, n_batches * size.batch).long()
        return (_sequences(self._validation, chunk, size.context) for chunk in starts.view(n_batches, -1))


def _sequences(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    window = text[starts[:, None] + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]


def derive_seed(seed: int, use: str) -> int:
    """Derive a generator's seed for one use of the user's seed, so that different uses have different numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed} {use}".encode()).digest()[:7], "big")


def read_text(data: Path | None) -> bytes:
    """Read up to `LIMIT` bytes of a file, of a folder's files in order of their names, or of the standard library.

    Binary files (those with a NUL byte) and hidden folders are skipped.

    Raises:
        UserError: `data` is missing or unreadable, or contains no text.
    """
    if data is None:
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        return _join(path for path in _walk(stdlib, _NOT_STDLIB) if path.suffix == ".py")
    try:
        data.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise UserError(f"--data {data} {reason}: use a text file, or a folder of text files") from error
    text = _join(_walk(data, frozenset()) if data.is_dir() else [data])
    if not text:
        raise UserError(f"--data {data} contains no readable text: use a text file, or a folder of text files")
    return text


def _walk(folder: Path, skipped: frozenset[str]) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
        yield from (Path(root, name) for name in sorted(names))


def _join(paths: Iterable[Path]) -> bytes:
    text = bytearray()
    for path in paths:
        text += _read_file(path, LIMIT - len(text))
        if len(text) == LIMIT:
            break
    return bytes(text)


def _read_file(path: Path, limit: int) -> bytes:
    """Return the start of a text file, or nothing for a binary, special or unreadable file in a folder."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            text = file.read(limit)
    except OSError:
        return b""
    return b"" if b"\0" in text else text
