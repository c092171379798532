"""`install`: replace torch's mixed precision with castwise's, for code that does not use castwise."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from castwise._guard import ErrorBoundary
from castwise._installation.account import Account
from castwise._installation.replacement import Replacement
from castwise._installation.settings import Settings
from castwise.amp._schedules import Schedule
from castwise.policy._policy import Policy

if TYPE_CHECKING:
    from castwise.report._summary import Summary

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
    on_nonfinite: Literal["diagnose"] | None = None,
    guard: bool = False,
    invariants: bool | Mapping[str, Sequence[str]] = True,
    spikes: bool = False,
    snapshots: bool = False,
    capsules: int = 3,
    shared_script: bool = False,
) -> None:
    """Replace torch's mixed precision with castwise's in this process, and find mistakes in its use.

    Replaces `torch.autocast`, `torch.GradScaler` and the names in `torch.amp`, `torch.cuda.amp`, `torch.cpu.amp` and
    `torch.distributed.fsdp.sharded_grad_scaler`, there and in every module that has already imported them. Existing
    objects and subclasses of torch's classes are not replaced; a warning names them. Loads torch's compiler, which the
    first optimizer would load anyway, and FSDP. `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` clip gradients
    of a `MasterWeights` in fp32, in its step.

    Each mistake is reported once, as a warning with file and line. The manual's page on `castwise run` lists them.

    Args:
        out: A folder of runs. Each model that an optimizer trains gets a `Monitor` before its first step, which writes
            to a new folder for this run, and `uninstall` writes `report.html` there. Ranks of a launch share the
            folder; `castwise report OUT` finds it. None records nothing, and so does a folder that cannot be written.
        every: Steps between two samples of these monitors.
        policy: Active in all regions instead of their dtype. It is bound to the models that exist when the first region
            is entered. With several models, names of modules start with the model's class (`Generator.layers.0`).
        schedule: Schedule of all enabled scalers, instead of their own settings.
        weight_cache: Give all regions a `WeightCache` of the models that exist when the first region is entered.
        on_nonfinite: `"diagnose"` looks at the losses and gradients of each step before it is taken, and replays the
            batch of a step with an inf or NaN. For this, a step's batches and the buffers that a forward writes are
            kept, at most 64 MiB. On an accelerator such a step is known two steps later. The replay then uses the
            weights of that time if a scaler has skipped the step, and if it was taken those that `snapshots` has kept.
        guard: Skip steps with an inf or NaN in a gradient also where there is no scaler, as `schedules.Guard()` does.
            On an accelerator each step then waits for the device.
        invariants: Check in recorded runs what holds in every correct one; see `Monitor`. A mapping from invariants to
            patterns of parameter names exempts these.
        spikes: Keep in recorded runs what tells more of the cause of a sudden rise of the loss; see `Monitor`.
        snapshots: Keep weights of earlier steps in the host's memory, to replay batches with; see `Monitor`.
        capsules: Largest number of capsules in a run's folder, >= 0: files with weights and batch of a diagnosed fault,
            to replay it elsewhere. See `castwise.diagnosis.Capsule`.
        shared_script: Load plotly.js in `report.html` from `castwise-plotly-<version>.js` in `out`, which reports of
            all runs share, instead of from the report itself.

    Raises:
        RuntimeError: castwise is already installed.
        TypeError: An argument has the wrong type.
        ValueError: `every` is not an integer >= 1, `capsules` is not an integer >= 0, `on_nonfinite` is invalid,
            `on_nonfinite`, `guard` or `spikes` is set without `out`, `snapshots` without `on_nonfinite`, or there is no
            invariant of a name.

    Warns:
        RuntimeWarning: At the first step, if `out` cannot be written.
        UserWarning: Some objects or classes could not be replaced.

    Example:
        >>> import castwise, torch
        >>> castwise.install()
        >>> torch.amp.GradScaler is castwise.GradScaler
        True
        >>> castwise.uninstall()
        >>> torch.amp.GradScaler is castwise.GradScaler
        False
    """
    if on_nonfinite not in (None, "diagnose"):
        raise ValueError(f'on_nonfinite must be "diagnose" or None, got {on_nonfinite!r}')
    if on_nonfinite and out is None:
        raise ValueError('on_nonfinite="diagnose" requires a folder for its records: pass out=... too')
    if guard and out is None:
        raise ValueError("guard=True requires a folder for its records: pass out=... too")
    if isinstance(capsules, bool) or not isinstance(capsules, int) or capsules < 0:
        raise ValueError(f"capsules must be an integer >= 0, got {capsules!r}")
    diagnoses = math.inf if on_nonfinite else 0
    if spikes and out is None:
        raise ValueError("spikes=True requires a folder for its records: pass out=... too")
    if snapshots and not on_nonfinite:
        raise ValueError('snapshots=True is for the replay of batches: pass on_nonfinite="diagnose" too')
    account = Account(
        out,
        every,
        diagnoses,
        skips=guard,
        invariants=invariants,
        spikes=spikes,
        snapshots=snapshots,
        capsules=capsules,
        shared_script=shared_script,
    )
    begin(account, Settings(policy, schedule, weight_cache))


def begin(account: Account, settings: Settings) -> None:
    """Install with a given account and settings."""
    with _LOCK:
        if _INSTALLED:
            raise RuntimeError("castwise is already installed: call uninstall() first")
        replacement = Replacement(settings)
        try:
            replacement.put_in_place()
            account.begin()
        except BaseException:
            account.stop()
            replacement.undo()
            raise
        _INSTALLED.append((replacement, account))
    with ErrorBoundary("castwise could not look for what it has not replaced"):
        replacement.warn_about_unreplaced()


def uninstall() -> Path | None:
    """Undo `install` and write the report. Does nothing if castwise is not installed.

    Modules that imported castwise's classes from torch in the meantime keep them.

    Returns:
        Path of the report, in the folder of the run; None if there is none.
    """
    summary = end()
    return None if summary is None else summary.report


def end() -> Summary | None:
    """Uninstall, and return the summary of the recorded runs; None if there are none."""
    with _LOCK:
        if not _INSTALLED:
            return None
        replacement, account = _INSTALLED.pop()
        with ErrorBoundary("castwise could not restore torch"):
            replacement.undo()
    with ErrorBoundary("castwise could not end the records and write the report"):
        return account.end()
    return None


def is_recording() -> bool:
    """Return True if castwise is installed and is recording a model."""
    with _LOCK:
        return any(account.has_recorded for _, account in _INSTALLED)


def describe_seen() -> str:
    """Return in words what castwise has observed since it was installed; empty if nothing."""
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
    on_nonfinite: Literal["diagnose"] | None = None,
    guard: bool = False,
    invariants: bool | Mapping[str, Sequence[str]] = True,
    spikes: bool = False,
    snapshots: bool = False,
    capsules: int = 3,
    shared_script: bool = False,
) -> Iterator[None]:
    """Call `install` at the start of a block and `uninstall` at its end, even after an error.

    Args:
        out: See `install`.
        every: See `install`.
        policy: See `install`.
        schedule: See `install`.
        weight_cache: See `install`.
        on_nonfinite: See `install`.
        guard: See `install`.
        invariants: See `install`.
        spikes: See `install`.
        snapshots: See `install`.
        capsules: See `install`.
        shared_script: See `install`.

    Example:
        >>> import castwise, torch
        >>> with castwise.installed():
        ...     scaler = torch.amp.GradScaler("cpu")
        >>> type(scaler) is castwise.GradScaler
        True
    """
    install(
        out,
        every=every,
        policy=policy,
        schedule=schedule,
        weight_cache=weight_cache,
        on_nonfinite=on_nonfinite,
        guard=guard,
        invariants=invariants,
        spikes=spikes,
        snapshots=snapshots,
        capsules=capsules,
        shared_script=shared_script,
    )
    try:
        yield
    finally:
        uninstall()
