"""Digests of a tensor's bits, which depend on positions: of equal bits equal, of others hardly ever."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

_ODD, _OTHER_ODD = 0x9E3779B97F4A7C15 - (1 << 64), 0xD6E8FEB86659FD93 - (1 << 64)
_BLOCK, _LARGE = 64, 4096  # words
_COLUMNS = 4099  # a prime: the rows of a weight that change places do not stay in their columns


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a digest of all bits of a tensor in logical order: int64, shape (), on its device. Does not sync.

    It differs after any change of one element. After a permutation it is the same only if each value has moved by a
    multiple of 32,792 bytes.

    Args:
        tensor: A strided tensor of any dtype.
    """
    return digest_of_words(_words_of(tensor), _COLUMNS)


def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a number for each of several tensors, in a third of the time of `digest`: int64. Does not sync.

    Each differs after any change of one element, and is the same after a permutation within a block of 512 bytes. It
    also depends on the shapes of the tensors before.

    Args:
        tensors: Strided, of any dtypes, on any devices; the numbers are on the first one's.
    """
    parts, lengths = [], []
    for words in map(_words_of, tensors):
        remaining = len(words) % _BLOCK
        if len(words) > _LARGE:  # of others, all words are mixed
            if remaining:
                parts.append(words[-remaining:])
                words = words[:-remaining]
            words = words.view(-1, _BLOCK).sum(1)  # three times as fast as the sum of rows
            lengths.append(len(words) + remaining)
        else:
            lengths.append(len(words))
        parts.append(words)
    device = tensors[0].device
    sums = torch.cat(parts if len({part.device for part in parts}) == 1 else [part.to(device) for part in parts])
    mixed = sums.bitwise_xor(sums >> 31).mul_(_known_multipliers(len(sums), device))
    until_each = mixed.cumsum(0).index_select(0, _last_of(tuple(lengths), device))
    return until_each.diff(prepend=until_each.new_zeros(1))


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as int64, flat, padded with zeros."""
    values = tensor.detach()
    if values.is_conj() or values.is_neg() or not values.is_contiguous():
        values = values.resolve_conj().resolve_neg().contiguous()
    size = values.itemsize
    values = values if values.storage_offset() * size % 8 == 0 else values.clone()
    if values.numel() and values.numel() * size % 8 == 0:
        return values.view(-1).view(torch.int64)
    stored = values.view(-1).view(torch.uint8) if values.numel() else values.new_zeros(8, dtype=torch.uint8)
    if len(stored) % 8:
        stored = torch.nn.functional.pad(stored, (0, -len(stored) % 8))
    return stored.view(torch.int64)


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


@functools.lru_cache(maxsize=8)
def _last_of(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the index of the last element of each of several parts that follow each other."""
    return torch.tensor(lengths, device=device).cumsum(0) - 1
