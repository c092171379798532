"""plotly.js for pages: packed in a page, or in one file that many pages load.

A page that loads the file allows it by a nonce. A hash would also check the content, but browsers check no hashes of
files that are opened from a disk.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from castwise import _files

_HEAD = "/* castwise: plotly.js, which pages of castwise load. */\n"


@dataclass(frozen=True)
class PlotlyScript:
    """How a page gets plotly.js.

    Args:
        packed: The library, packed; "" if the page loads a file.
        url: The file's URL, relative to the page; "" if the page holds the library.
        nonce: The nonce of the file; "" if there is none.
        source: What the page's Content-Security-Policy allows.
    """

    packed: str
    url: str
    nonce: str
    source: str


def without_unused(plotly_js: str, known: Mapping[str, Any]) -> str:
    """Return the library without the kinds of plots that no page draws; a quarter of it is left.

    Args:
        plotly_js: The library.
        known: By the SHA-256 of a library, "cuts": where each part that is left out begins and ends, as
            `tests/report/plotly_cuts.mjs` finds them. Of any other library, all is kept.
    """
    entry = known.get(hashlib.sha256(plotly_js.encode()).hexdigest(), {"cuts": []})
    ends = [0, *(end for _, end in entry["cuts"])]
    starts = [*(start for start, _ in entry["cuts"]), len(plotly_js)]
    return "".join(plotly_js[end:start] for end, start in zip(ends, starts, strict=True))


@functools.cache  # to compress it takes longer than the rest of a small page
def in_page(plotly_js: str) -> PlotlyScript:
    """Return the library for a page that holds it."""
    return PlotlyScript(packed(plotly_js), "", "", script_hash(plotly_js))


def in_file(plotly_js: str, version: str, page: Path, folder: Path) -> PlotlyScript:
    """Write the library as `castwise-plotly-<version>.js` unless it is there, and return it for a page that loads it.

    Args:
        plotly_js: The library.
        version: Its version.
        page: The page's file.
        folder: The folder of the library's file.

    Raises:
        FileExistsError: There is a file of that name that castwise has not written.
        OSError: The file cannot be written.
    """
    file, content = folder / f"castwise-plotly-{version}.js", f"{_HEAD}{plotly_js}".encode()
    if not (file.is_file() and file.read_bytes() == content):
        _files.replace(file, content, "a script", is_shared_script)
    nonce = secrets.token_urlsafe(16)
    return PlotlyScript("", quote(Path(os.path.relpath(file, page.parent)).as_posix()), nonce, f"nonce-{nonce}")


def is_shared_script(head: bytes) -> bool:
    """Return True for the start of a script that castwise has written."""
    return head.startswith(_HEAD.encode())


def packed(text: str) -> str:
    """Return compressed text as base64, which cannot close a script element."""
    return base64.b64encode(gzip.compress(text.encode(errors="backslashreplace"), compresslevel=9, mtime=0)).decode()


def script_hash(script: str) -> str:
    """Return a script's hash as Content-Security-Policy spells it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
