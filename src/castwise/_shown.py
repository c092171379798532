"""Results as text and, in notebooks, as HTML: both are made of the same blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import Self

from castwise._frames import new_frame
from castwise._number_text import several
from castwise._text_table import aligned

if TYPE_CHECKING:
    import pandas

# Colours are those of the page, so that tables can be read on light and on dark ones.
_CELL = "padding:2px 10px 2px 0;border-bottom:1px solid rgba(128,128,128,.35);vertical-align:top"

_TILE = "padding:3px 10px;border:0;border-radius:3px;font-weight:normal;white-space:nowrap"


class Table(NamedTuple):
    """A block with rows of text.

    Args:
        rows: The rows, of equal lengths, header first.
        right: Indices of the columns of numbers.
        title: A line above the table.
        more: A line below it.
    """

    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()
    title: str = ""
    more: str = ""


class Tile(NamedTuple):
    """A coloured number.

    Args:
        number: The number, as text.
        shade: From 0 for no colour to 1; None for inf and NaN.
        note: A few words behind the number.
        is_chosen: Whether it has a frame.
    """

    number: str
    shade: float | None
    note: str = ""
    is_chosen: bool = False


class Tiles(NamedTuple):
    """A picture of coloured numbers, in HTML alone: where it stands, the text has tables of them.

    Args:
        title: A line above it.
        columns: Names of the columns.
        rows: Name and tiles of each row.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Tile]]]


class Code(str):
    """A block of code, or of other text whose spaces and line ends count."""


Block = Table | Tiles | Code | str


def as_text(blocks: Iterable[Block]) -> str:
    """Return blocks as text, with an empty line between two of them."""
    texts = (block if isinstance(block, str) else _text(block) for block in blocks if not isinstance(block, Tiles))
    return "\n\n".join(texts)


def as_html(blocks: Iterable[Block]) -> str:
    """Return blocks as HTML without scripts, for `_repr_html_`."""
    return f"<div>{''.join(map(_html, blocks))}</div>"


def escape(text: str) -> str:
    """Return text as HTML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _text(table: Table) -> str:
    right = {column for column in table.right if column < len(table.rows[0])}
    return "\n".join(filter(None, [table.title, aligned(table.rows, right), table.more]))


def _lines(text: str) -> str:
    return f'<p style="white-space:pre-line;margin:.5em 0">{escape(text)}</p>'


def _html(block: Block) -> str:
    if isinstance(block, Code):
        return f'<pre style="margin:.5em 0;padding:0;background:none;color:inherit">{escape(block)}</pre>'
    if isinstance(block, Tiles):
        return _tiles(block)
    return _lines(block) if isinstance(block, str) else _table(block)


def _tiles(tiles: Tiles) -> str:
    head = "".join(f'<th style="{_TILE};text-align:right">{escape(name)}</th>' for name in tiles.columns)
    name_style = f"{_TILE};padding-left:0;text-align:left"
    rows = (f'<th style="{name_style}">{escape(name)}</th>{"".join(map(_tile, of))}' for name, of in tiles.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="castwise-tiles">{_lines(tiles.title)}<table style="border-collapse:separate;border-spacing:2px">'
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _tile(tile: Tile) -> str:
    # Blue for numbers, which lets the text of light and dark pages be read, and red for what is not finite.
    colour = "220,60,60,.45" if tile.shade is None else f"70,130,220,{0.75 * tile.shade:.2f}"
    frame = ";outline:2px solid" if tile.is_chosen else ""
    note = f" <small>{escape(tile.note)}</small>" if tile.note else ""
    style = f"{_TILE};text-align:right;background:rgba({colour}){frame}"
    return f'<td style="{style}">{escape(tile.number)}{note}</td>'


def _table(table: Table) -> str:
    head, *rows = table.rows
    caption = f'<caption style="text-align:left;padding:.4em 0">{escape(table.title)}</caption>'
    return (
        f'<table style="border-collapse:collapse">{caption if table.title else ""}'
        f"<thead>{_row(head, table.right, 'th')}</thead>"
        f"<tbody>{''.join(_row(cells, table.right, 'td') for cells in rows)}</tbody></table>"
        f"{_lines(table.more) if table.more else ''}"
    )


def _row(cells: Sequence[str], right: Collection[int], tag: str) -> str:
    sides = ["right" if column in right else "left" for column in range(len(cells))]
    return f"<tr>{''.join(map(_cell, cells, sides, repeat(tag)))}</tr>"


def _cell(text: str, side: str, tag: str) -> str:
    # Browsers break 1e-05 behind the minus.
    breaks = "nowrap" if side == "right" and tag == "td" else "pre-line"
    return f'<{tag} style="{_CELL};text-align:{side};white-space:{breaks}">{escape(text)}</{tag}>'


class Shown(ABC):
    """A base of results that print as text and are shown as HTML in notebooks."""

    @abstractmethod
    def _blocks(self) -> Iterable[Block]:
        """Return what is shown."""

    def __str__(self) -> str:
        return as_text(self._blocks())

    def _repr_html_(self) -> str:
        return as_html(self._blocks())


class ShownText(str):
    """A text that is shown as HTML in notebooks. In all else but its `repr`, it is a plain `str`."""

    _blocks: tuple[Block, ...]

    @classmethod
    def of(cls, *blocks: Block, between: str = "\n\n") -> Self:
        """Return the text of blocks, which `between` separates."""
        text = cls(between.join(as_text([block]) for block in blocks))
        text._blocks = blocks
        return text

    def __repr__(self) -> str:
        return f"<text of {several(len(self.splitlines()), 'line')}, which print() shows>"

    def _repr_html_(self) -> str:
        return as_html(self._blocks)


class ShownCounts(dict[str, int]):
    """A dict of numbers that is shown as a table in notebooks. In all else, it is a plain `dict`."""

    _title: str

    @classmethod
    def of(cls, counts: Mapping[str, int], title: str) -> Self:
        """Return a dict of counts; the title stands above the table."""
        found = cls(counts)
        found._title = title
        return found

    def frame(self) -> pandas.DataFrame:
        """Return a pandas frame with a row for each number: `part` and `count`.

        Raises:
            ImportError: pandas is not installed; it comes with `castwise[pandas]`.
        """
        return new_frame(("part", "count"), self.items())

    def _repr_html_(self) -> str:
        return as_html([Table([(name, f"{count:,}") for name, count in self.items()], {1}, self._title)])
