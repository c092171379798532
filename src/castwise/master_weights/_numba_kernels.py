"""A step of AdamW on 16-bit weights in one pass over memory, compiled by numba.

It has the order and the rounding of torch's fused kernel. Tensors come as addresses: numpy has no bfloat16, and views
of tensors would cost more than a small step. A weight is stepped in chunks, whose borders are multiples of `CHUNK` in
its bucket. Loops over chunks are "parallel", in one thread, because numba vectorizes so many arrays only there, and
only as long as nothing else is done beside.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, prange, types
from numba.extending import intrinsic, overload

from castwise.master_weights._kernels import POOL

CHUNK = 2048
"""Elements in a chunk: a divisor of `POOL`."""
PLAIN, SQUARE_LAST, SQUARE_FIRST = 0, 1, 2
"""How b2 * v + (c2 * g) * g is rounded: each operation, or once with the second or with the first product exact."""

_HALF, _WORD, _FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()
_TIE = np.int16(-(1 << 15))
# What is found in a chunk.
_IS_TIE, _NAN, _DIGEST_OF_A_PART = 1, 2, 4
_KERNEL: dict[str, Any] = {"error_model": "numpy", "cache": True, "nogil": True}


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """Return an address as a pointer."""
    return types.voidptr(types.int64), lambda _, builder, __, args: builder.inttoptr(args[0], ir.PointerType())


@intrinsic
def _fused(context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.fma", [_FLOAT], ir.FunctionType(_FLOAT, [_FLOAT] * 3))
        return builder.call(function, args)

    return types.float32(types.float32, types.float32, types.float32), code


@intrinsic
def _joined(context: Any, weight: Any, residue: Any) -> Any:
    """Return the fp32 number of a bfloat16 number's bits and the residue to add."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        upper = builder.shl(builder.zext(args[0], _WORD), _WORD(16))
        return builder.bitcast(builder.add(upper, builder.sext(args[1], _WORD)), _FLOAT)

    return types.float32(types.int16, types.int16), code


@intrinsic
def _lower(context: Any, value: Any) -> Any:
    """Return the residue of an fp32 number."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.trunc(builder.bitcast(args[0], _WORD), _HALF)

    return types.int16(types.float32), code


@intrinsic
def _upper(context: Any, value: Any) -> Any:
    """Return the bits of the nearest bfloat16 number; of a tie, the larger magnitude; wrong for NaN."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _WORD)
        residue = builder.sext(builder.trunc(bits, _HALF), _WORD)
        return builder.trunc(builder.lshr(builder.sub(bits, residue), _WORD(16)), _HALF)

    return types.int16(types.float32), code


@intrinsic
def _special(context: Any, value: Any) -> Any:
    """Return `_NAN`, `_IS_TIE`, or 0 for other numbers."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        is_tie = builder.icmp_unsigned("==", builder.trunc(builder.bitcast(args[0], _WORD), _HALF), _HALF(_TIE))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        return builder.select(is_nan, _WORD(_NAN), builder.select(is_tie, _WORD(_IS_TIE), _WORD(0)))

    return types.int32(types.float32), code


@intrinsic
def _by_chance(context: Any, value: Any, word: Any) -> Any:
    """Return the bits of an fp32 number that is rounded to bfloat16 by the upper half of a random word."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        rounded = builder.add(builder.bitcast(args[0], _WORD), builder.lshr(args[1], _WORD(16)))
        upper = builder.trunc(builder.lshr(rounded, _WORD(16)), _HALF)
        return builder.select(builder.fcmp_unordered("uno", args[0], args[0]), _HALF(0x7FC0), upper)

    return types.int16(types.float32, types.int32), code


@intrinsic
def _sum(context: Any, a: Any, b: Any) -> Any:
    """Return a + b modulo 2^32."""
    return types.int32(types.int32, types.int32), lambda _, builder, __, args: builder.add(*args)


@intrinsic
def _with_weight(context: Any, total: Any, index: Any, weight: Any) -> Any:
    """Return a digest's sum with one more weight."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        factor = builder.or_(builder.mul(builder.trunc(args[1], _WORD), _WORD(0x9E3779B1)), _WORD(1))
        return builder.add(args[0], builder.mul(builder.zext(args[2], _WORD), factor))

    return types.int32(types.int32, types.int64, types.int16), code


@njit(**_KERNEL)
def _digest(weights: Any) -> Any:
    """Return a hash of 16-bit weights, which depends on their positions."""
    total = np.int32(0)
    for index in range(len(weights)):
        total = _with_weight(total, index, weights[index])
    return total


@njit(**_KERNEL)
def _squares(form: int, b2: Any, average: Any, c2: Any, grad: Any) -> Any:
    if form == SQUARE_LAST:
        return _fused(c2 * grad, grad, average * b2)
    if form == SQUARE_FIRST:
        return _fused(average, b2, c2 * grad * grad)
    return average * b2 + c2 * grad * grad


def _read(stored: Any) -> Any:
    """Return stored state in fp32."""
    raise NotImplementedError  # in Python


def _stored(value: Any, word: Any, like: Any) -> Any:
    """Return state as it is stored, in the type of `like`; bits of bfloat16 are rounded by a random word."""
    raise NotImplementedError  # in Python


@overload(_read, strict=False)
def _read_of(stored: Any) -> Any:
    return (lambda stored: stored) if stored == types.float32 else lambda stored: _joined(stored, np.int16(0))


@overload(_stored, strict=False)
def _stored_of(value: Any, word: Any, like: Any) -> Any:
    if like == types.float32:
        return lambda value, word, like: value
    return lambda value, word, like: _by_chance(value, word)


@njit(**_KERNEL)
def _round_up(ties: Any, bits: Any, offset: int) -> None:
    """Round ties up that were rounded down, so that weights and residues are the two parts of fp32 numbers."""
    index = np.searchsorted(ties, offset)
    while index < len(ties) and ties[index] < offset + len(bits):
        bits[ties[index] - offset] += np.int16(1)
        index += 1


@njit(**_KERNEL)
def _round_ties(bits: Any, residues: Any) -> Any:
    """Round ties to even that `_upper` has rounded up; return their positions."""
    ties = [0 for _ in range(0)]
    for index in range(len(bits)):
        if residues[index] == _TIE and bits[index] & 1:
            bits[index] -= np.int16(1)
            ties.append(index)
    return ties


@njit(**_KERNEL)
def _mend_nans(bits: Any, residues: Any) -> None:
    for index in range(len(bits)):
        value = _joined(bits[index], residues[index])
        if value != value:
            bits[index] = np.int16(0x7FC0)


@njit(parallel=True, **_KERNEL)
def digests_of(weights: int, length: int, offset: int, ties: Any) -> Any:
    """Return a digest of each chunk of a segment: int32. They are of the weights with all ties rounded up.

    Args:
        weights: Address of the bfloat16 weights.
        length: Number of weights.
        offset: Position of the segment in its bucket.
        ties: int64: sorted positions in the bucket of ties that were rounded down.
    """
    bits, start = carray(_pointer(weights), length, np.int16), offset // CHUNK
    digests = np.empty((offset + length + CHUNK - 1) // CHUNK - start, np.int32)
    for chunk in prange(len(digests)):
        begin, end = max(0, (start + chunk) * CHUNK - offset), min(length, (start + chunk + 1) * CHUNK - offset)
        digests[chunk] = _digest(bits[begin:end])
    index = np.searchsorted(ties, offset)
    while index < len(ties) and ties[index] < offset + length:
        chunk = ties[index] // CHUNK - start
        begin = max(0, (start + chunk) * CHUNK - offset)
        digests[chunk] = _with_weight(digests[chunk], ties[index] - offset - begin, np.int16(1))
        index += 1
    return digests


@njit(**_KERNEL)
def step(memory: Any, place: Any, forms: Any, setting: Any, ties: Any, digests: Any, chance: Any) -> Any:
    """Step a segment of a weight in AdamW, and return which of its new ties are rounded down, as `ties`.

    Args:
        memory: int64: addresses of its weights, residues, gradients, first and second moments.
        place: Its length; its position in the bucket; and the number of its first elements that torch steps in vectors.
        forms: How torch rounds second moments of these and of the others: `PLAIN`, `SQUARE_LAST` or `SQUARE_FIRST`.
        setting: fp32: 1 - lr * weight decay; 1 - beta1; beta2; 1 - beta2; the root of the second bias correction; eps;
            -lr divided by the first bias correction; and what gradients are multiplied by.
        ties: int64: sorted positions in the bucket of ties that were rounded down.
        digests: int32: replaced with `digests_of` the new weights.
        chance: int32 words that round moments in bfloat16: a pool, a start for each of its rows for first moments, and
            the same for second moments. Without starts, moments are in fp32, and the pool is not used.
    """
    length, offset, in_vectors = place
    bits, residues = carray(_pointer(memory[0]), length, np.int16), carray(_pointer(memory[1]), length, np.int16)
    grads, found = carray(_pointer(memory[2]), length, np.int16), np.zeros(len(digests), np.int32)
    _round_up(ties, bits, offset)
    for begin, end, form in ((0, in_vectors, forms[0]), (in_vectors, length, forms[1])):
        if begin == end:
            continue
        chunk, at = (offset + begin) // CHUNK - offset // CHUNK, (offset + begin, form)
        w, r, g, d, f = bits[begin:end], residues[begin:end], grads[begin:end], digests[chunk:], found[chunk:]
        if len(chance[1]):
            low_first = carray(_pointer(memory[3]), length, np.int16)[begin:end]
            low_second = carray(_pointer(memory[4]), length, np.int16)[begin:end]
            _step(w, r, g, low_first, low_second, d, f, at, setting, chance)
        else:
            first = carray(_pointer(memory[3]), length, np.float32)[begin:end]
            second = carray(_pointer(memory[4]), length, np.float32)[begin:end]
            _step(w, r, g, first, second, d, f, at, setting, chance)
    if in_vectors < length:  # chunks that have both kinds got the digest of a part
        found[(offset + in_vectors) // CHUNK - offset // CHUNK :] |= _DIGEST_OF_A_PART
    new_ties = [0 for _ in range(0)]
    for chunk in np.flatnonzero(found):
        begin = max(0, (offset // CHUNK + chunk) * CHUNK - offset)
        end = min(length, (offset // CHUNK + chunk + 1) * CHUNK - offset)
        if found[chunk] & _NAN:
            _mend_nans(bits[begin:end], residues[begin:end])
        if found[chunk] & (_NAN | _DIGEST_OF_A_PART):
            digests[chunk] = _digest(bits[begin:end])
        for tie in _round_ties(bits[begin:end], residues[begin:end]):
            new_ties.append(offset + begin + tie)
    return np.array(new_ties, np.int64)


@njit(parallel=True, **_KERNEL)
def _step(
    bits: Any,
    residues: Any,
    grads: Any,
    firsts: Any,
    seconds: Any,
    digests: Any,
    found: Any,
    place: Any,
    setting: Any,
    chance: Any,
) -> None:
    """Step elements of a segment. Arrays are not in tuples, because numba 0.68 then drops writes to some of them."""
    offset, form = place
    pool, first_starts, second_starts = chance
    decay, c1, b2, c2, correction, eps, rate, factor = setting
    start, length = offset // CHUNK, len(bits)
    for chunk in prange((offset + length + CHUNK - 1) // CHUNK - start):
        begin, end = max(0, (start + chunk) * CHUNK - offset), min(length, (start + chunk + 1) * CHUNK - offset)
        w, r, g, m, v = bits[begin:end], residues[begin:end], grads[begin:end], firsts[begin:end], seconds[begin:end]
        column, row = (offset + begin) % POOL, (offset + begin) // POOL
        words = pool[column:]
        first_start, second_start = np.int32(0), np.int32(0)
        if len(first_starts):
            first_start, second_start = first_starts[row], second_starts[row]
        specials, digest = np.int32(0), np.int32(0)
        for index in range(end - begin):
            grad, average = _joined(g[index], np.int16(0)) * factor, _read(m[index])
            first = _fused(c1, grad - average, average)
            second = _squares(form, b2, _read(v[index]), c2, grad)
            m[index] = _stored(first, _sum(words[index], first_start), m[index])
            v[index] = _stored(second, _sum(words[index], second_start), v[index])
            value = _joined(w[index], r[index]) * decay
            value += rate * first / (np.float32(math.sqrt(second)) / correction + eps)
            upper = _upper(value)
            w[index], r[index] = upper, _lower(value)
            specials |= _special(value)
            digest = _with_weight(digest, index, upper)
        digests[chunk] = digest
        found[chunk] |= specials
