"""The exception that all commands show as one line instead of a traceback."""

from __future__ import annotations


class UserError(Exception):
    """An error that the user can fix; its text is the whole message and explains the fix."""
