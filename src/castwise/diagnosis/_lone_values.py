"""Lines at which torch has computed the std of a single value, which is NaN, outside any graph."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from typing import NamedTuple

from castwise._mistakes.mistake import Place

# Torch warns of them, and Python notes in the module at fault which lines it has shown a warning for.
_WARNING = re.compile(r"(std|var)(?:_mean)?\(\): degrees of freedom is <= 0")


class LoneValue(NamedTuple):
    """A std or variance of a single value.

    Args:
        op: Its name, such as "aten.std".
        place: Its line.
    """

    op: str
    place: Place


def find_lone_value(file: str) -> LoneValue | None:
    """Return the only one that the code of a file has computed; None if there are none or several.

    Where the script ignores warnings, none is known.

    Args:
        file: Path of the file, as in its frames.
    """
    found = set()
    for module in list(sys.modules.values()):
        with suppress(Exception):  # modules may be any objects
            registry = vars(module).get("__warningregistry__", {}) if vars(module).get("__file__") == file else ()
            for key in registry:
                if isinstance(key, tuple) and (match := _WARNING.match(str(key[0]))):
                    found.add(LoneValue(f"aten.{match[1]}", Place(file, key[2])))
    return found.pop() if len(found) == 1 else None
