"""`install`: castwise instead of torch's mixed precision, for code that does not know it."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from castwise.amp.schedules import Schedule
from castwise.installation.account import Account
from castwise.installation.replacement import Replacement
from castwise.installation.settings import Settings
from castwise.policy.policy import Policy

if TYPE_CHECKING:
    from castwise.report.summary import Summary

__all__ = ["install", "installed", "uninstall"]

_LOCK = threading.RLock()
_INSTALLED: list[tuple[Replacement, Account]] = []


def install(
    out: str | os.PathLike[str] | None = None,
    *,
    every: int = 100,
    policy: Policy | None = None,
    schedule: Schedule | None = None,
    weight_cache: bool = False,
    on_skip: Literal["diagnose"] | None = None,
) -> None:
    """Replace torch's mixed precision with castwise's in this process, and find mistakes in its use.

    From now on `torch.autocast`, `torch.GradScaler` and what `torch.amp`, `torch.cuda.amp`, `torch.cpu.amp` and
    `torch.distributed.fsdp.sharded_grad_scaler` have are castwise's, there and in every module that has imported them
    already. Existing objects and subclasses of torch's classes stay as they are, and a warning names them.
    It loads torch's compiler, which the first optimizer would load anyway, and FSDP.

    Each mistake is reported once, as a warning with file and line: the manual's page on `castwise run` lists them.

    Args:
        out: A folder. Each model that an optimizer trains gets a `Monitor` after its first step, which writes a folder
            of its own there, and `uninstall` writes `report.html`. None records nothing.
        every: Steps between two samples of these monitors.
        policy: Bound to the models that there are when the first region is entered, and active in all regions instead
            of their dtype. With several models, names of modules begin with the class of
            the model (`Generator.layers.0`).
        schedule: Schedule of all enabled scalers, instead of their own numbers.
        weight_cache: Give all regions a `WeightCache` of the models that there are when the first one is entered.
        on_skip: `"diagnose"` replays the batch of each skipped step, for which a step's batches and the model's buffers
            are kept, 64 MiB at most. On an accelerator it is known two steps later, and replayed with the weights of
            then.

    Raises:
        RuntimeError: It is installed already.
        TypeError: An argument has the wrong type.
        ValueError: `every` is not a number of steps, or `on_skip` is something else or has no folder to write into.

    Warns:
        UserWarning: There is something that could not be replaced.

    Example:
        >>> import castwise, torch
        >>> castwise.install()
        >>> torch.amp.GradScaler is castwise.GradScaler
        True
        >>> castwise.uninstall()
        >>> torch.amp.GradScaler is castwise.GradScaler
        False
    """
    if on_skip not in (None, "diagnose"):
        raise ValueError(f'on_skip must be "diagnose" or None, got {on_skip!r}')
    if on_skip and out is None:
        raise ValueError('on_skip="diagnose" records what it finds: give a folder, out=..., too')
    begin(Account(out, every, math.inf if on_skip else 0), Settings(policy, schedule, weight_cache))


def begin(account: Account, settings: Settings) -> None:
    """`install` what has been set up."""
    with _LOCK:
        if _INSTALLED:
            raise RuntimeError("castwise is installed already: uninstall() it first")
        replacement = Replacement(settings)
        replacement.put_in_place()
        account.begin()
        _INSTALLED.append((replacement, account))
    replacement.warn_of_what_is_left()


def uninstall() -> Path | None:
    """Restore torch as it was before `install`, and write the report; do nothing if castwise is not installed.

    Modules that have imported castwise's classes as torch's in between keep them.

    Returns:
        The report; None if there is none.
    """
    summary = end()
    return None if summary is None else summary.report


def end() -> Summary | None:
    """`uninstall`, and return what the recorded runs come down to; None if there are none."""
    with _LOCK:
        if not _INSTALLED:
            return None
        replacement, account = _INSTALLED.pop()
        replacement.undo()
    return account.end()


def is_recording() -> bool:
    """Return True if castwise is installed, and a model is being recorded in a folder."""
    with _LOCK:
        return any(account.has_recorded for _, account in _INSTALLED)


def what_was_seen() -> str:
    """Return, in words, what castwise has seen of a training run while it is installed; empty if nothing."""
    with _LOCK:
        return ", ".join(filter(None, [account.seen for _, account in _INSTALLED]))


@contextmanager
def installed(
    out: str | os.PathLike[str] | None = None,
    *,
    every: int = 100,
    policy: Policy | None = None,
    schedule: Schedule | None = None,
    weight_cache: bool = False,
    on_skip: Literal["diagnose"] | None = None,
) -> Iterator[None]:
    """`install` at the beginning of a block, and `uninstall` at its end, also after an error.

    Args:
        out: As for `install`.
        every: As for `install`.
        policy: As for `install`.
        schedule: As for `install`.
        weight_cache: As for `install`.
        on_skip: As for `install`.

    Example:
        >>> import castwise, torch
        >>> with castwise.installed():
        ...     scaler = torch.amp.GradScaler("cpu")
        >>> type(scaler) is castwise.GradScaler
        True
    """
    install(out, every=every, policy=policy, schedule=schedule, weight_cache=weight_cache, on_skip=on_skip)
    try:
        yield
    finally:
        uninstall()
