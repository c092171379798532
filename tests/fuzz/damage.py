"""Files and values that are nearly right."""

from __future__ import annotations

import copy
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st


def a_share(divisor: int) -> settings:
    """A fraction of the profile's examples, for tests of which each example takes long."""
    return settings(max_examples=max(settings.default.max_examples // divisor, 5))  # type: ignore[union-attr]


@contextmanager
def soon(seconds: float = 60.0) -> Iterator[None]:
    """Fail after so many seconds, which no example takes on the busiest machine; not to be nested."""

    def late(*_: object) -> None:
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def attempt(call: Callable[[], Any], *refusals: type[Exception]) -> tuple[Any, str | None]:
    """What a call returns, or the text with which it refuses; anything else that it raises is a defect."""
    try:
        with soon():
            return call(), None
    except refusals as error:
        return None, str(error)


NUMBERS = (
    st.sampled_from(
        [
            0,
            -1,
            1,
            2**31,
            2**53,
            2**63,
            -(2**63),
            10**30,
            10**400,
            0.0,
            -0.0,
            1e-320,
            1e308,
            -1e308,
            math.nan,
            math.inf,
            -math.inf,
        ]
    )
    | st.floats()
)
TEXTS = st.sampled_from(
    ["", "nan", "inf", "-inf", "\ud800", "\x1b[31m", "\x00", "a" * 400, "<script>", "0", "float16", "{}"]
) | st.text(max_size=8)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=5
)


@st.composite
def changed(draw: st.DrawFn, valid: Any, values: st.SearchStrategy[Any] = JSON) -> Any:
    """A copy of nested dicts and lists in which one to three places hold something else, are gone, or are new."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        value = draw(_one_change(value, values))
    return value


@st.composite
def _one_change(draw: st.DrawFn, value: Any, values: st.SearchStrategy[Any]) -> Any:
    inside = value
    while isinstance(inside, (dict, list)) and inside:
        key = draw(st.sampled_from(list(inside) if isinstance(inside, dict) else range(len(inside))))
        action = draw(st.sampled_from(["deeper", "deeper", "replace", "remove", "add"]))
        if action == "deeper" and isinstance(inside[key], (dict, list)) and inside[key]:
            inside = inside[key]
            continue
        if action == "remove":
            del inside[key]
        elif action == "add" and isinstance(inside, dict):
            inside[draw(TEXTS)] = draw(values)
        elif action == "add":
            inside.insert(key, draw(values))
        else:
            inside[key] = draw(values)
        return value
    return draw(values)


PIECES = st.binary(max_size=4) | st.sampled_from(
    [
        *(b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"9" * 5000, b"null", b"true", b'"', b"{", b"}", b"[" * 3000),
        *(
            b'{"a":' * 3000,
            b"\xff\xfe",
            b"\x00",
            b"\xef\xbb\xbf",
            b"\n",
            b"\r\n",
            b"\\ud800",
            b"=",
            b"[[a]]",
            b"1979-05-27",
        ),
    ]
)


@st.composite
def mangled(draw: st.DrawFn, valid: bytes) -> bytes:
    """Bytes of which a few were replaced, inserted, repeated or cut off."""
    content = valid
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.integers(start, min(start + 40, len(content))))
        action = draw(st.sampled_from(["replace", "insert", "repeat", "cut"]))
        if action == "cut":
            content = content[:start] if draw(st.booleans()) else content[start:]
        elif action == "repeat":
            content = content[:end] + content[start:end] + content[end:]
        else:
            content = content[:start] + draw(PIECES) + content[end if action == "replace" else start :]
    return content
