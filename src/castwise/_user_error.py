"""The exception that commands show as one line instead of a traceback; all of them share it."""

from __future__ import annotations


class UserError(Exception):
    """Something that the user can put right; the text is the whole message and says how."""
