"""Run a script with castwise in torch's place, and report when it ends."""

from __future__ import annotations

import atexit
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import castwise
import castwise._installation
from castwise._cli.completion import RUNS
from castwise._cli.own_frames import end_by_interrupt, hide_own_frames
from castwise._cli.program import Program
from castwise._cli.report_text import print_summary
from castwise._cli.termination import Termination
from castwise._fixing.corrections import corrections
from castwise._installation.account import Account
from castwise._installation.settings import Settings
from castwise._mistakes.mistake import Mistake
from castwise._mistakes.watch import WATCH
from castwise._number_text import several
from castwise.amp._schedules import Schedule
from castwise.monitor._ranks import rank_now
from castwise.monitor._records import MistakeRecord
from castwise.policy._policy import Policy
from castwise.report._summary import Level, Summary

_LINES_SHOWN = 3  # of an edit


class Ending(NamedTuple):
    """What to do when a script ends.

    Args:
        fail_on: Exit with code 1 on one of these levels, unless the script itself failed.
        as_json: Print one line of JSON instead of text.
        check: What `castwise check` said before the run, which goes on all the same; None if all was well.
    """

    fail_on: tuple[Level, ...] = ()
    as_json: bool = False
    check: str | None = None


class Watching(NamedTuple):
    """What to record of a script.

    Args:
        out: The folder of runs.
        every: Steps between two samples.
        diagnoses: Largest number of diagnosed steps per model and cause.
        guard: Whether to skip steps with an inf or NaN, also without a scaler.
        exemptions: Patterns of parameters that are exempt from invariants.
        spikes: Whether to keep what tells more of the cause of a spike.
        snapshots: Whether to keep weights of earlier steps to replay batches with.
        capsules: Largest number of capsules of faults.
        shared_script: Whether reports load plotly.js from a file in the folder of runs.
    """

    out: Path
    every: int
    diagnoses: float
    guard: bool
    exemptions: Mapping[str, Sequence[str]]
    spikes: bool
    snapshots: bool
    capsules: int
    shared_script: bool


class Script:
    """A program, run with castwise in torch's place."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._is_interrupted = self._has_failed = False

    def run(
        self,
        watching: Watching,
        policy: Policy | None,
        schedule: Schedule | None,
        weight_cache: bool,
        ending: Ending,
    ) -> None:
        """Run the script and re-raise its exceptions; the report is written when the process exits."""
        out, settings = watching.out, Settings(policy, schedule, weight_cache)
        checked: dict[str, Any] = {
            "skips": watching.guard,
            "invariants": watching.exemptions,
            "spikes": watching.spikes,
            "snapshots": watching.snapshots,
            "capsules": watching.capsules,
            "shared_script": watching.shared_script,
        }
        account = Account(out, watching.every, watching.diagnoses, **checked)
        account.say = _print_of_rank
        try:
            castwise._installation.begin(account, settings)
        except Exception as error:
            account.failure = f"castwise could not be installed: {type(error).__name__}: {error}"
            _print_of_rank(account.failure)
        self._termination = Termination(lambda: self._report_now(out, ending, account, settings))
        WATCH.warns = False  # scripts may filter warnings
        WATCH.subscribe(self._print_mistake)
        atexit.register(
            self._finish, out, os.getpid(), ending, account, settings
        )  # registered before the script's own handlers, so it runs after them
        self._termination.watch()
        sys.excepthook = sys.__excepthook__  # typer replaced it
        try:
            self.program.execute()
        except SystemExit as exit_:
            self._has_failed = exit_.code not in (None, 0)
            raise
        except BaseException as error:
            # Python ends after Ctrl-C in a script by the signal, but not in a module.
            self._is_interrupted = isinstance(error, KeyboardInterrupt) and not self.program.is_module
            self._has_failed = True
            hide_own_frames()
            raise

    def _print_mistake(self, mistake: Mistake) -> None:
        if rank_now() == 0:  # all ranks run the same script
            print(f"castwise: {mistake}", file=sys.stderr)

    def _finish(self, out: Path, pid: int, ending: Ending, account: Account, settings: Settings) -> None:
        """Write the report and print the summary."""
        if os.getpid() != pid:
            return  # this is a forked worker
        with self._termination.ending():
            self._end(out, ending, account, settings)
        if self._is_interrupted:
            end_by_interrupt()

    def _report_now(self, out: Path, ending: Ending, account: Account, settings: Settings) -> None:
        """Write the report of a run that is being ended by a signal, without what has not been recorded yet."""
        self._has_failed = True  # the signal decides the exit code
        summary = account.report()
        if rank_now() == 0:
            self._print(out, ending, account, settings, summary, None if account.has_recorded else account.seen)

    def _end(self, out: Path, ending: Ending, account: Account, settings: Settings) -> None:
        was_recording, seen = castwise._installation.is_recording(), castwise._installation.describe_seen()
        summary = castwise._installation.end()
        WATCH.stop()
        if rank_now() == 0:
            self._print(out, ending, account, settings, summary, None if was_recording else seen)

    def _print(
        self,
        out: Path,
        ending: Ending,
        account: Account,
        settings: Settings,
        summary: Summary | None,
        seen: str | None = None,
    ) -> None:
        lines = [f"recorded in {account.run or out}"] if summary is None or summary.report is None else []
        if seen is not None:
            lines = [] if account.failure else [_without_records(account.run, seen)]
        mistakes = [MistakeRecord.of(mistake) for mistake in WATCH.found]  # including those found only now
        checked = [] if ending.check is None else [f"castwise check, before the run: {ending.check}"]
        notes = [*checked, *account.notes, *settings.notes, *_edits(out, summary)]
        self._print_summary(lines, replace(summary or Summary(), mistakes=mistakes, notes=notes), ending)

    def _print_summary(self, lines: list[str], summary: Summary, ending: Ending) -> None:
        if ending.as_json:
            print(json.dumps(summary.record()), file=sys.stderr)
        else:
            print_summary([*lines, *summary.lines()])
        if summary.fails(ending.fail_on) and not self._has_failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exit handler cannot change the exit code in another way


def _edits(out: Path, summary: Summary | None) -> list[str]:
    """Return a line that leads to `castwise fix`, where it has an edit; with the edit, if it is one of few lines."""
    edits, new = 0, list[str]()
    with suppress(Exception):  # a script that cannot be read is no reason to end the run
        scripts = [script for script in corrections(summary.runs if summary is not None else ()) if script.edits]
        edits = sum(script.edits for script in scripts)
        new = scripts[0].new_lines() if edits == 1 else []
    where = "" if str(out) == RUNS else f" {shlex.quote(str(out))}"
    text = f"castwise fix{where} prints {several(edits, 'edit')} of the script for this (untried)"
    if 0 < len(new) <= _LINES_SHOWN:
        text = "\n".join([f"{text}:", *(f"    + {line}" for line in new)])
    return [text] if edits else []


def _print_of_rank(text: str) -> None:
    rank = rank_now()
    print(f"castwise: {f'rank {rank}: ' if rank else ''}{text}", file=sys.stderr)


def _without_records(run: Path | None, seen: str) -> str:
    text = "no optimizer of a module has stepped"
    text += f" in this process, which saw {seen}" if seen else ", so nothing was recorded"
    if run is not None:
        text += f"; forked workers left records: run castwise report {run}"
    return text
