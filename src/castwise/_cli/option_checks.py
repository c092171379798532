"""Checks of options that need no torch, which takes seconds to load."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from castwise._cli.completion import POLICIES, SCHEDULES
from castwise._suggestions import listed, nearest
from castwise._user_error import UserError


def check_name(option: str, given: str | None, known: Collection[str]) -> None:
    """Raise a UserError if an option is given and is not one of the known names."""
    if given is not None and given not in known:
        raise UserError(f"{option} must be one of {listed(known)}, got {given!r}{nearest(given, known)}")


def check_policy(text: str) -> None:
    """Raise a UserError if `--policy` names neither a policy nor a file that can be opened."""
    if text in POLICIES:
        return
    path = Path(text)
    if path.suffix not in {".toml", ".json"}:
        raise UserError(
            f"--policy must be a .toml or .json file, or one of {listed(POLICIES)}, got {text!r}"
            f"{nearest(text, POLICIES)}; Policy(...).to_file('policy.toml') writes such a file"
        )
    try:
        path.open("rb").close()
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; check the path, or use one of {listed(POLICIES)}"
        ) from None


def check_schedule_name(name: str, text: str) -> None:
    """Raise a UserError if the name of a schedule in `--schedule TEXT` is none."""
    if name not in SCHEDULES:
        raise UserError(f"--schedule must be one of {listed(SCHEDULES)}, got {text!r}{nearest(name, SCHEDULES)}")


def check_target(text: str, option: str = "--model") -> tuple[str, str]:
    """Return the module or file, and the function in it, that an option names.

    Raises:
        UserError: It is not of the form MODULE|FILE:FUNCTION, or there is no such file.
    """
    module_or_file, _, name = text.rpartition(":")
    if not module_or_file or not name:
        raise UserError(
            f"{option} must be MODULE:FACTORY or FILE:FACTORY, such as models.gpt:make or models/gpt.py:make, "
            f"got {text!r}"
        )
    if module_or_file.endswith(".py"):
        try:
            Path(module_or_file).open("rb").close()
        except OSError as error:
            raise UserError(
                f"cannot read {module_or_file}: {error.strerror}; check the path given to {option}"
            ) from None
        except ValueError as error:  # null bytes
            raise UserError(f"{module_or_file} is not a Python file: {error}") from None
    return module_or_file, name
