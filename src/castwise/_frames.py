"""Results as pandas frames."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


def new_frame(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> pandas.DataFrame:
    """Return a frame of rows.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("frame() needs pandas: pip install 'castwise[pandas]'") from error
    return pandas.DataFrame(list(rows), columns=list(columns))
