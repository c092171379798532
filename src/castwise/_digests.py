"""Digests of a tensor's bits, which depend on positions: of equal bits equal, of others hardly ever."""

from __future__ import annotations

import functools

import torch

_ODD, _OTHER_ODD = 0x9E3779B97F4A7C15 - (1 << 64), 0xD6E8FEB86659FD93 - (1 << 64)
_COLUMNS = 4099  # a prime: the rows of a weight that change places do not stay in their columns


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a digest of all bits of a tensor in logical order: int64, shape (), on its device. Does not sync.

    It differs after any change of one element. After a permutation it is the same only if each value has moved by a
    multiple of 32,792 bytes.

    Args:
        tensor: A strided tensor of any dtype.
    """
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    values = values if values.storage_offset() * values.itemsize % 8 == 0 else values.clone()
    stored = values.view(-1).view(torch.uint8) if values.numel() else torch.zeros(8, dtype=torch.uint8)
    if len(stored) % 8:
        stored = torch.nn.functional.pad(stored, (0, -len(stored) % 8))
    return digest_of_words(stored.view(torch.int64), _COLUMNS)


def digest_of_words(words: torch.Tensor, columns: int) -> torch.Tensor:
    """Return a digest of words, in one pass over them: int64, shape (). Does not sync.

    Args:
        words: int64, flat.
        columns: Words that are this far apart are added.
    """
    sums = words
    if columns < len(words):
        rows = len(words) // columns
        sums = words[: rows * columns].view(rows, columns).sum(0)
        remaining = words[rows * columns :]
        sums[: len(remaining)].add_(remaining)
    # A product passes on no bit to lower ones, so the signs in the top bits would get lost without the shift.
    mixed = sums.bitwise_xor(sums >> 31)
    factors = _known_multipliers(columns, words.device)[: len(sums)]
    # CUDA has no dot product of integers.
    return torch.dot(mixed, factors) if words.device.type == "cpu" else (mixed * factors).sum()


def multipliers(begin: int, end: int, device: torch.device) -> torch.Tensor:
    """Return an odd pseudo-random number for each position, without structure: swaps must not cancel each other."""
    numbers = torch.arange(begin + 1, end + 1, device=device).mul_(_ODD)
    numbers.bitwise_xor_(numbers >> 29).mul_(_OTHER_ODD)
    return numbers.bitwise_xor_(numbers >> 32).bitwise_or_(1)


@functools.cache
def _known_multipliers(length: int, device: torch.device) -> torch.Tensor:
    return multipliers(0, length, device)
