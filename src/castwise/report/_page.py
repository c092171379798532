"""What the pages of runs and of comparisons share: their templates, scripts and filters, and how they are written."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise import _files
from castwise._number_text import headroom, percent
from castwise.report._plotly_script import PlotlyScript, in_file, in_page, without_unused
from castwise.report._run_facts import shown

if TYPE_CHECKING:
    from jinja2 import Environment

# Module names and settings can have any length, so they are shortened to keep the page small. Findings and remedies are
# shown in full; only a forged record exceeds their limit.
MAX_TEXT = 300
MAX_FINDING = 10_000
# Characters of a module name that fit beside the columns of numbers; hovering shows the full name.
MAX_NAME = 44


def write_page(target: Path, html: str) -> None:
    """Write a page, over an existing one of castwise.

    Raises:
        FileExistsError: There is a file that castwise has not written.
        OSError: It cannot be written.
    """
    # A path in it may contain characters that cannot be encoded.
    _files.replace(target, html.encode(errors="backslashreplace"), "a page", is_page)


def is_page(head: bytes) -> bool:
    """Return True for the start of a page that castwise has written."""
    return head.startswith(b"<!doctype html>") and b"<title>castwise: " in head


def environment() -> Environment:
    try:
        import jinja2  # noqa: F401  # a missing library is named on each call
    except ModuleNotFoundError as error:
        raise _missing("jinja2") from error
    return _environment()


@functools.cache  # which keeps the templates compiled
def _environment() -> Environment:
    import jinja2

    made = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FunctionLoader(template),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters.update(
        headroom=headroom, percent=percent, shown=shown, powers=_powers, short=shortened, name=_name, sortable=sortable
    )
    made.filters["breaking"] = _breaking
    return made


def load_plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # plotly ships no types
    except ModuleNotFoundError as error:
        raise _missing("plotly") from error
    return _without_unused(get_plotlyjs)


@functools.cache
def _without_unused(get_plotlyjs: Callable[[], object]) -> str:
    return without_unused(str(get_plotlyjs()), json.loads(template("plotly_cuts.json")))


def plotly_for(page: Path, plotly_js: str, shared: bool | str | os.PathLike[str]) -> PlotlyScript:
    """Return how a page gets plotly.js; see `write_report` for `shared`."""
    if shared is False:
        return in_page(plotly_js)
    from plotly.offline import get_plotlyjs_version

    return in_file(plotly_js, get_plotlyjs_version(), page, page.parent if shared is True else Path(shared))


def _missing(name: str) -> ImportError:
    return ImportError(f"a report needs {name}: pip install 'castwise[report]'")


def template(name: str) -> str:
    return (resources.files("castwise.report") / "templates" / name).read_text(encoding="utf-8")


def own_script(name: str) -> str:
    """Return a page's own script, with what unpacks the page and copies code."""
    return template("unpack.js") + template(name) + template("copy.js")


def as_json(value: object) -> str:
    """Return compact JSON; NaN is an error."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _powers(text: str) -> Any:
    """Render powers of two such as 2^16 with superscript exponents."""
    from markupsafe import Markup, escape

    def set_(match: re.Match[str]) -> str:
        return f"2<sup>{match[1].replace('-', '&minus;')}</sup>"  # lines can break after a hyphen, not a minus

    return Markup(re.sub(r"\b2\^(-?[\d.]*\d)", set_, str(escape(shortened(text, MAX_FINDING)))))


def shortened(text: object, most: int = MAX_TEXT) -> str:
    spelled = f"{text:,}" if isinstance(text, int) and not isinstance(text, bool) else str(text)
    return spelled if len(spelled) <= most else f"{spelled[:most]}…"


def _name(text: str) -> str:
    """Shorten a module name in the middle; its end, such as the layer number, says more than its start."""
    first = MAX_NAME // 4
    return text if len(text) <= MAX_NAME else f"{text[:first]}…{text[first + 1 - MAX_NAME :]}"


def _breaking(text: str) -> Any:
    """Let lines break after the dots and underscores of names, but not of numbers."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([._])(?=[^\W\d])", r"\1<wbr>", str(escape(text))))


def sortable(value: float) -> float:
    """Return a finite number, for the page to sort by; headroom is infinite where all numbers are zero."""
    return value if math.isfinite(value) else math.copysign(1e9, value)
