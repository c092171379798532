"""`record` and `check`: is a program still the same computation, and as accurate?"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

from castwise._notebook import notebook_progress
from castwise.checking import _judging as judging
from castwise.checking._golden import Golden
from castwise.checking._measuring import Plan, ProgramError, Train, Way, measure, measure_apart
from castwise.checking._ops import OpDifferences, differences
from castwise.checking._recorder import DECIDING, Measurement
from castwise.checking._result import CheckResult

ROUNDED_RUNS = 6
"""Runs with random rounding that a recording makes."""
Progress = Callable[[str, int, int], None]
_OF_SETS = "; if data depend on the order of a set of strings, set PYTHONHASHSEED=0 when recording and when checking"

_ONLY_IN_FLOAT64 = (
    "it runs as it is, but not in float64, in which a recording computes it, too; code that asserts a dtype must allow "
    "float64"
)


class NotReproducibleError(Exception):
    """Two runs of a program differ in float64, so it cannot be compared with a later version.

    Args:
        message: What differs, and what to do.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)


class _Runs:
    """Runs a program in several ways, with progress."""

    def __init__(
        self,
        train: Train,
        steps: int,
        apart: bool,
        progress: Progress | None,
        total: int,
        ranks: int = 1,
        others: bool = True,
    ) -> None:
        self._others = others
        self._train, self._steps, self._apart, self._ranks = train, steps, apart or ranks > 1, ranks
        self._progress, self._done, self._total = progress, 0, total

    def run(
        self, way: Way, seed: int = 0, train: Train | None = None, steps: int | None = None, until: Iterable[str] = ()
    ) -> Measurement:
        if self._progress is not None:
            self._progress(f"run {self._done + 1} ({way})", self._done, max(self._total, self._done + 1))
        self._done += 1
        names = frozenset(until if self._ranks == 1 else ())  # a rank must not end while others wait for it
        plan = Plan(way, steps or self._steps, seed, self._ranks, self._others, names)
        return (measure_apart if self._apart else measure)(train or self._train, plan)


def record(
    train: Train,
    steps: int = 3,
    *,
    apart: bool = False,
    ranks: int = 1,
    progress: Progress | None = None,
) -> Golden:
    """Run a program ten times and return what it computes, and how accurately.

    The runs: as it is, with each module once more in float64, twice in float64, and six times with random rounding.
    Each ends after the given number of optimizer steps. Random number generators are seeded before each run.

    Args:
        train: A function of no argument, or of a probe. It builds model, optimizer and data, all from fixed seeds, and
            trains. `probe(name, tensor)` records a value of its own. A function of a probe runs on after the last
            step until its next backward, so that it can probe what the trained model returns.
        steps: Steps of each optimizer until the program is ended, at least 1.
        apart: Whether each run is a process of its own, for programs that change state outside themselves. On Linux,
            castwise's own process must then not have computed anything on an accelerator.
        ranks: Processes that run the program together, started with the variables that torchrun sets. More than one
            are always apart. What rank 0 computes is compared, and of all ranks whether the bits are the same.
        progress: Called before each run with what it is, the runs done, and all runs. By default, notebooks show a bar.

    Raises:
        ValueError: `steps` or `ranks` is below 1, or the program takes fewer steps and no probe, or its loss or an
            update has an inf or NaN.
        NotReproducibleError: Two runs of the program differ in float64.
        ProgramError: With `apart`, the program raised.

    Example:
        >>> import torch, castwise.checking
        >>> def train():
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Linear(4, 2)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     for _ in range(2):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(3, 4)).square().mean().backward()
        ...         optimizer.step()
        >>> golden = castwise.checking.record(train, steps=2)
        >>> castwise.checking.check(train, golden).kind
        'identical'
    """
    _check_counts(steps, ranks)
    with notebook_progress() as shown:
        return _record(_Runs(train, steps, apart, progress or shown, 4 + ROUNDED_RUNS, ranks), steps)


def _check_counts(steps: int, ranks: int) -> None:
    for name, count in (("steps", steps), ("ranks", ranks)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def _record(runs: _Runs, steps: int) -> Golden:
    plain = runs.run("plain")
    _check_steps(plain, steps)
    try:
        exact = runs.run("exact-modules")
    except ProgramError as error:
        raise ProgramError(f"{_ONLY_IN_FLOAT64}\n{error}") from None
    moved = runs.run("exact-rounded", seed=1)
    _check_finite(exact)
    local = runs.run("local")
    if (local.digests, local.losses) != (plain.digests, plain.losses):
        again = runs.run("exact-modules")
        worst = max(judging.errors(again.probes, exact.probes).values(), default=0.0)
        if worst > judging.SAME or exact.probes.keys() != again.probes.keys():
            raise NotReproducibleError(
                f"two runs of the program differ in float64, by up to {worst:.1e}: build model, optimizer and data "
                f"from fixed seeds{_OF_SETS if exact.about['string_hash'] != again.about['string_hash'] else ''}"
            )
    rounded = [runs.run("rounded", seed) for seed in range(1, ROUNDED_RUNS + 1)]
    return _golden_of(plain, exact, moved, local, rounded)


def _check_steps(plain: Measurement, steps: int) -> None:
    has_values = any(key.kind == "value" for key in plain.probes)
    if plain.steps < steps and not (has_values and plain.steps == 0):
        skipped = f", and its scaler skipped {plain.skipped}" if plain.skipped else ""
        advice = (
            "record fewer steps"
            if plain.steps
            else "processes that it starts itself are not seen, see `ranks`; without an optimizer of torch's, record a "
            "function and what it passes to `probe`"
        )
        raise ValueError(f"the program took {plain.steps} optimizer steps of {steps}{skipped}: {advice}")


def _check_finite(exact: Measurement) -> None:
    """Refuse a program in which an inf or NaN spreads: all that follows would be equal."""
    for key, sketch in exact.probes.items():
        if key.kind in ("loss", "update") and not math.isfinite(sketch.norm):
            what = "loss" if key.kind == "loss" else f"update of {key.name}"
            raise ValueError(
                f"the {what} in step {key.step + 1} has an inf or NaN, also in float64: `castwise run` tells where it "
                "comes from; record fewer steps, or the mended program"
            )


def _golden_of(
    plain: Measurement, exact: Measurement, moved: Measurement, local: Measurement, rounded: list[Measurement]
) -> Golden:
    deciding = {key: sketch for key, sketch in exact.probes.items() if key.kind in DECIDING}
    spreads = [judging.own_errors(run.probes, deciding) for run in rounded]
    dtypes = set().union(*(run.dtypes for run in rounded))
    golden = Golden(
        plain.steps,
        next((dtype for dtype in ("float16", "bfloat16") if dtype in dtypes), "float32"),
        {**plain.about, "commit": _commit()},
        plain.settings,
        plain.digests,
        plain.losses,
        exact.probes,
        exact.callers,
        judging.own_errors(plain.probes, deciding),
        skipped=plain.skipped,
    )
    golden.spreads = {key: max((run.get(key, 0.0) for run in spreads), default=0.0) for key in golden.errors}
    largest = {name: max(error, *(run.local.get(name, 0.0) for run in rounded)) for name, error in local.local.items()}
    golden.local = {name: error for name, error in largest.items() if math.isfinite(error)}
    golden.left_out = judging.noise_of(exact, moved)
    return golden


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def check(
    train: Train,
    golden: Golden | str | os.PathLike[str],
    *,
    apart: bool = False,
    progress: Progress | None = None,
) -> CheckResult:
    """Compare a program with what was recorded of it.

    The program runs once as it is. If its bits differ, it runs in float64, which tells whether it is the same function.
    It then runs once more: if it is, with each module in float64, which tells whether it is as accurate; if not, in
    float64 with a look at each module, which tells where the first difference is.

    Args:
        train: See `record`.
        golden: What `record` returned, or the path of a golden file.
        apart: See `record`.
        progress: See `record`.

    Raises:
        ValueError: The file is not a golden file.
        OSError: The file cannot be read.
        Exception: What the program raises as it is; with `apart`, a ProgramError.
    """
    golden = golden if isinstance(golden, Golden) else Golden.load(golden)
    with notebook_progress() as shown:
        ranks, is_of_a_run = int(golden.about.get("ranks", 1)), bool(golden.about.get("is_of_a_run"))
        return _check(_Runs(train, golden.steps or 1, apart, progress or shown, 3, ranks, not is_of_a_run), golden)


def _check(runs: _Runs, golden: Golden) -> CheckResult:
    plain = runs.run("plain")
    notes = _environment_notes(golden, plain)
    settings = judging.changed_settings(golden, plain.settings)
    if plain.steps < golden.steps:
        text = f"the program took {plain.steps} optimizer steps, and {golden.steps} were recorded"
        text += f"; its scaler skipped {plain.skipped}: lower its initial scale" if plain.skipped else ""
        return CheckResult("cannot tell", f"cannot tell: {text}", notes=notes)
    calls_backward = judging.has_losses(golden.probes), judging.has_losses(plain.probes)
    if any(calls_backward) and not all(calls_backward) and not golden.about.get("is_of_a_run"):
        notes += ("losses are not compared, because only one of the two versions calls `backward`",)
    compares_losses = bool(golden.losses) and all(calls_backward)
    if plain.digests == golden.digests and not settings and not (compares_losses and plain.losses != golden.losses):
        what = "losses, gradients, weights and buffers" if compares_losses else "gradients, weights and buffers"
        return CheckResult("identical", f"identical: all {what} have the same bits", notes=notes)
    if golden.about.get("is_of_a_run"):
        return _compared_with_a_run(runs, golden, (*notes, *settings))
    if plain.is_compiled:
        notes += ("compiled code ran as eager code in float64; its accuracy is that of the compiled code",)
    try:
        exact = runs.run("exact")
    except Exception as error:
        return _without_float64(golden, plain, error, notes)
    return _judged(runs, golden, plain, exact, settings, notes)


def _compared_with_a_run(runs: _Runs, golden: Golden, notes: tuple[str, ...]) -> CheckResult:
    """Return whether rounding explains how far a recorded run, which has no float64, is from the program of today.

    The program of today is recorded for it, with float64 and random rounding.
    """
    try:
        now = _record(runs, golden.steps)
    except Exception as error:
        last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        return CheckResult("cannot tell", f"cannot tell: the program cannot be recorded: {last[0]}", notes=notes)
    found = judging.accuracy(now, judging.errors(golden.probes, now.probes))
    missing = sum(key not in now.probes for key in golden.probes)
    if found is None or missing:
        text = f"{missing} recorded values are missing" if missing else "no value is accurate enough to compare"
        return CheckResult("cannot tell", f"cannot tell: {text}", notes=notes)
    notes += (
        f"error against float64 of today: {found.error:.1e} in the recorded {found.value}; today: "
        f"{found.recorded:.1e}, {found.spread:.1e} with random rounding; {found.ratio:.3g} x, "
        f"allowed are {found.allowed:g} x",
        "the golden file was recorded by a Monitor, so it has no float64: `castwise check record` can tell more",
    )
    if found.ratio <= found.allowed:
        return CheckResult("cannot tell", "cannot tell: no more than rounding explains", notes=notes)
    where = judging.owner_of(found.value, now.local)
    text = f"different function, or less accurate when recorded: {found.value}, {found.ratio:.3g} x"
    return CheckResult("different", text, where, notes=notes)


def _without_float64(golden: Golden, plain: Measurement, error: Exception, notes: tuple[str, ...]) -> CheckResult:
    """Return how far a program that float64 stops is from the recording in float64, which hides small differences."""
    last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    found = judging.accuracy(golden, judging.errors(plain.probes, golden.probes))
    if found is not None:
        what = "no more" if found.ratio <= found.allowed else "more"
        notes += (f"compared with the recording in float64 instead: {what} than rounding explains",)
    text = f"cannot tell: the program does not run in float64: {last[0]}"
    return CheckResult("cannot tell", text, accuracy=found, notes=notes)


def _judged(
    runs: _Runs,
    golden: Golden,
    plain: Measurement,
    exact: Measurement,
    settings: dict[str, bool],
    notes: tuple[str, ...],
) -> CheckResult:
    names = judging.renamed(golden, exact.probes)
    if names:
        notes += (f"{len(names)} parameters have other names, and were matched by position and initial values",)
    compared = judging.Comparison(golden, judging.with_old_names(exact.probes, names))
    facts: dict[str, Any] = {
        "difference": compared.largest,
        "compared": len(compared.deciding),
        "left_out": compared.left_out,
    }
    has_skipped = bool(plain.skipped or golden.skipped)
    if not has_skipped:
        own = judging.own_errors(plain.probes, exact.probes)
        facts["accuracy"] = judging.accuracy(golden, judging.with_old_names(own, names))
    if compared.is_different:
        ordered = sorted(settings, key=settings.__getitem__, reverse=True)
        return _different(runs, compared, exact, names, ordered, notes, facts)
    deciding = [text for text, decides in settings.items() if decides]
    notes += tuple(f"setting without effect in these steps: {text}" for text in settings if text not in deciding[:1])
    if deciding:
        text = f"different function: setting {deciding[0]}, without effect in these steps"
        return CheckResult("different", text, "setting", notes=notes, **facts)
    if compared.largest > judging.SAME:
        text = f"cannot tell: the largest difference in float64 is {compared.largest:.1e}"
        return CheckResult("cannot tell", text, notes=notes, **facts)
    if not compared.deciding:
        return CheckResult("cannot tell", "cannot tell: all values are rounding noise", notes=notes, **facts)
    if has_skipped:
        text = "cannot tell: the same function, but a gradient scaler skipped steps, so accuracy cannot be compared; "
        return CheckResult("cannot tell", text + "lower its initial scale", notes=notes, **facts)
    ways: list[Way] = ["local", "compiled"] if plain.is_compiled else ["local"]
    return _accuracy(runs, golden, ways, notes, facts)


def _different(
    runs: _Runs,
    compared: judging.Comparison,
    exact: Measurement,
    names: dict[str, str],
    settings: list[str],
    notes: tuple[str, ...],
    facts: dict[str, Any],
) -> CheckResult:
    again = runs.run("exact-modules").probes
    before, now = (judging.with_old_names(probes, names) for probes in (exact.probes, again))
    repeated = judging.errors(now, before)
    worst = max((error for key, error in repeated.items() if key not in compared.golden.left_out), default=0.0)
    if worst > judging.SAME:
        text = f"cannot tell: two runs of the program differ in float64, by up to {worst:.1e}; fix its seeds"
        return CheckResult("cannot tell", text, notes=notes, **facts)
    if compared.golden.about.get("string_hash") != exact.about["string_hash"]:
        notes += (f"strings have other hashes than in the recording{_OF_SETS}",)
    if compared.missing:
        notes += (f"recorded values that are missing: {len(compared.missing)}",)
    place, step = judging.Comparison(compared.golden, {**now, **before}).place()
    last = compared.golden.steps
    when = f"after step {last}" if step > last > 0 else f"step {step}"
    if place == "optimizer" and settings:
        text, notes = f"optimizer, {settings[0]}", notes + tuple(f"also: {each}" for each in settings[1:])
    else:
        text, notes = f"{place}, {when}", notes + tuple(settings)
    return CheckResult("different", f"different function: {text}", place, notes=notes, **facts)


def _accuracy(
    runs: _Runs,
    golden: Golden,
    ways: list[Way],
    notes: tuple[str, ...],
    facts: dict[str, Any],
) -> CheckResult:
    worst = facts["accuracy"]
    noisy = sum(max(error, golden.spreads[key]) >= judging.USABLE for key, error in golden.errors.items())
    if noisy:
        notes += (
            f"values whose recorded error is above {judging.USABLE}, so that their accuracy is not compared: {noisy}",
        )
    of_modules = [judging.accuracy_of_modules(golden, runs.run(way, steps=1, until=golden.local).local) for way in ways]
    for found in (*of_modules, worst):
        if found is not None and not found.ratio <= found.allowed:
            where = judging.owner_of(found.value, golden.local) if found is worst else found.value
            text = f"same function, less accurate: {where}, {found.ratio:.3g} x"
            return CheckResult("less accurate", text, where, notes=notes, **(facts | {"accuracy": found}))
    if worst is None:
        notes += ("no value is accurate enough in the golden to compare its accuracy",)
    return CheckResult("same", "same function, as accurate", notes=notes, **facts)


def compare_ops(
    before: Train,
    now: Train,
    steps: int = 2,
    *,
    apart: bool = False,
    ranks: int = 1,
    progress: Progress | None = None,
) -> OpDifferences:
    """Return which ops of two versions of a program differ: by module and line, with dtypes and arguments.

    Each runs once in its own dtypes. This names what has changed and judges nothing: a rewrite that computes the same
    runs other ops, too. It also shows one more rounding to bfloat16, which no value tells from the others.

    Args:
        before: The old version; see `record`.
        now: The new version.
        steps: Optimizer steps that are compared, at least 1.
        apart: See `record`.
        ranks: See `record`.
        progress: See `record`.

    Raises:
        ValueError: `steps` or `ranks` is below 1, or neither version runs an op.
        ProgramError: With `apart`, a version raised.
    """
    _check_counts(steps, ranks)
    with notebook_progress() as shown:
        runs = _Runs(before, steps, apart, progress or shown, 2, ranks)
        old, new = runs.run("ops").ops, runs.run("ops", train=now).ops
    if not (old or new):
        raise ValueError("neither version ran an op: processes that a program starts itself are not seen; see `ranks`")
    return differences(old, new)


def _environment_notes(golden: Golden, plain: Measurement) -> tuple[str, ...]:
    now = plain.about
    names = ("torch", "device", "threads", "python")
    changed = [name for name in names if golden.about.get(name) != now[name]]
    return tuple(f"recorded with {name} {golden.about.get(name)}, now {now[name]}" for name in changed)
