"""Files of gzip members: each record is one, so a file can be read up to its last whole member, and by `zcat`."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from typing import BinaryIO

_MAGIC = b"\x1f\x8b\x08"
HEADER = _MAGIC + b"\x10\0\0\0\0\0\xffcastwise"
"""What each member begins with: the header of gzip (RFC 1952) with a comment. It shows that castwise wrote a file."""
_OF_SAMPLE = b" sample"
_COMMENTED = re.compile(re.escape(HEADER) + b"(%s)?\0" % _OF_SAMPLE)
MOST_BYTES = 64 << 20
"""Limit for the bytes of a member, unpacked, because a file may be untrusted."""
_BLOCK = 1 << 13
_SHORT = 1 << 9


def gzip_member(content: bytes, *, is_sample: bool = False) -> bytes:
    """Return one member with this content. The comments of samples differ, so that they are found without unpacking."""
    if len(content) <= _SHORT:  # a step's: deflate would take eight times as long, and save a seventh
        length = len(content).to_bytes(2, "little")
        body = b"\1" + length + bytes(255 - byte for byte in length) + content  # stored: RFC 1951, 3.2.4
    else:
        deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        body = deflate.compress(content) + deflate.flush()
    head = HEADER + (_OF_SAMPLE if is_sample else b"") + b"\0"
    return head + body + zlib.crc32(content).to_bytes(4, "little") + len(content).to_bytes(4, "little")


def samples(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each sample's member in a file that castwise has written."""
    file.seek(0)
    begun: int | None = None
    for start, is_sample in _headers(file):
        if begun is not None:
            yield begun, start
        begun = start if is_sample else None
    if begun is not None:
        yield begun, file.seek(0, os.SEEK_END)


def end_of_whole(file: BinaryIO) -> int:
    """Return where the last whole member ends in a file that castwise has written, or a crash has cut off."""
    file.seek(0)
    last = max((start for start, _ in _headers(file)), default=0)
    inflate, position = zlib.decompressobj(wbits=zlib.MAX_WBITS + 16), file.seek(last)
    while not inflate.eof:
        block = inflate.unconsumed_tail or file.read(_BLOCK)
        position += 0 if inflate.unconsumed_tail else len(block)
        try:
            inflate.decompress(block, 1 << 20)
        except zlib.error:
            return last
        if not block:
            return last
    return position - len(inflate.unused_data)


def _headers(file: BinaryIO) -> Iterator[tuple[int, bool]]:
    """Yield where members begin from the file's position 0 on, and whether each is a sample's."""
    position, rest = 0, b""
    while block := file.read(1 << 20):
        content, done = rest + block, 0
        for header in _COMMENTED.finditer(content):
            yield position + header.start(), header[1] is not None
            done = header.end()
        done = max(done, len(content) - len(HEADER) - len(_OF_SAMPLE))  # a header may go on in the next block
        position, rest = position + done, content[done:]


def is_packed(head: bytes) -> bool:
    """Return True for the start of a file of gzip members of any program."""
    return head.startswith(_MAGIC[:1])  # no JSON begins so


def members(file: BinaryIO) -> Iterator[bytes]:
    """Yield the contents of the whole members of a file, in time linear in its size, without a broken last one.

    Raises:
        ValueError: A member before the last is damaged, or one has more than `MOST_BYTES` bytes, or all together have
            more than that plus sixty-four times the size of the file.
    """
    size = os.fstat(file.fileno()).st_size
    most_of_all = left = MOST_BYTES + 64 * size
    is_first, rest = True, b""
    while rest := rest or file.read(_BLOCK):
        inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS + 16)
        content, is_ours = bytearray(), HEADER.startswith(rest[: len(HEADER)].rstrip(b"\0"))
        most = min(MOST_BYTES, left)
        while not inflate.eof:
            if not (rest := rest or file.read(_BLOCK)):
                if is_ours or not is_first:
                    return  # its writer was killed, or is still writing
                raise ValueError("it is truncated")
            try:
                content += inflate.decompress(rest, most - len(content) + 1)
            except zlib.error as error:
                if (is_first and not is_ours) or _has_more(rest, file):
                    raise ValueError(f"it is damaged: {error}") from None
                return
            if len(content) > most:
                limit = f"{most_of_all:,} bytes, the limit for a file of this size"
                raise ValueError(
                    f"the records have more than {limit}"
                    if most < MOST_BYTES
                    else f"it has more than {most:,} bytes, the limit for a record"
                )
            rest = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
        left -= len(content)
        yield bytes(content)
        is_first = False


def _has_more(rest: bytes, file: BinaryIO) -> bool:
    """Return True if another member begins after a damaged one, of which the header may be the start of `rest`."""
    rest = rest[1:]
    while HEADER not in rest:
        if not (block := file.read(1 << 20)):
            return False
        rest = rest[-len(HEADER) :] + block
    return True
