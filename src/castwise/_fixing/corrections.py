"""`corrections`: the edits for what a run has found, script by script."""

from __future__ import annotations

import difflib
import io
import os
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from castwise._fixing.edits import Change, changed
from castwise._fixing.mistake_fixes import Fix, fix_of_loss, fix_of_mistake
from castwise._mistakes.bounded_ops import bounded_input
from castwise._mistakes.mistake import is_passed_over
from castwise._script_source import ScriptSource
from castwise.monitor._recorded_run import Run, distinct_mistakes
from castwise.monitor._records import MistakeRecord
from castwise.report._diagnosed import Diagnosed, diagnosed


class Finding(NamedTuple):
    """Something that a run has found in a line of a script.

    Args:
        file: Path of the script.
        line: Line number, from 1.
        source: The line's text when the run was made, without indentation.
        text: What is wrong.
        remedy: The remedy in words or code.
        record: Where it comes from.
    """

    file: str
    line: int
    source: str
    text: str
    remedy: str
    record: MistakeRecord | Diagnosed

    def fix(self, source: ScriptSource, line: int) -> Fix:
        """Return the changes that correct it in a script where its line now has this number."""
        if source.line(line).strip() != self.source:
            return "the line has changed since the run, or by this edit or another: run the script again"
        if isinstance(self.record, MistakeRecord):
            return fix_of_mistake(self.record.name, source, line)
        if self.record.code.startswith("with torch.autocast"):
            return fix_of_loss(self.record.code, source, line)
        dtypes = [text.split()[0] for text in self.record.inputs if "float" in text.split()[0]]
        bounded = bounded_input(self.record.op, self.record.advice, dtypes, source, line)
        return bounded if isinstance(bounded, str) else (Change(*bounded[0], bounded[1]),)


@dataclass(frozen=True)
class Corrected:
    """A script and its edits.

    Args:
        path: The script.
        raw: Its bytes.
        encoding: Their encoding.
        old: Its text.
        new: Its text with all edits.
        fixed: What the edits correct.
        by_hand: What they do not, and why.
        edits: How many there are; one may correct several findings.
    """

    path: Path
    raw: bytes = b""
    encoding: str = "utf-8"
    old: str = ""
    new: str = ""
    fixed: Sequence[Finding] = ()
    by_hand: Sequence[tuple[Finding, str]] = ()
    edits: int = 0

    def diff(self) -> str:
        """Return a unified diff, which `patch` and `git apply` read; "" without edits."""
        mark = "\ufeff" if self.encoding == "utf-8-sig" else ""
        old, new = (_rows(f"{mark}{text}") for text in (self.old, self.new))
        lines = difflib.unified_diff(old, new, f"a/{self.path}", f"b/{self.path}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def new_lines(self) -> list[str]:
        """Return the statements that the edits write, complete, without the indentation that all of them have.

        Empty if lines are removed, also because they are moved: new ones do not show that.
        """
        source = ScriptSource(self.new)
        edited = difflib.SequenceMatcher(None, _rows(self.old), _rows(self.new), autojunk=False).get_opcodes()
        if any(tag == "delete" for tag, *_ in edited):
            return []
        lines: set[int] = set()
        for line in (line for tag, _, _, start, end in edited if tag != "equal" for line in range(start + 1, end + 1)):
            lines.add(line)
            for each in source.statements_at(line):
                if not hasattr(each, "body"):
                    lines.update(range(each.lineno, (each.end_lineno or line) + 1))
        return textwrap.dedent("\n".join(map(source.line, sorted(lines)))).splitlines()

    def record(self) -> dict[str, object]:
        """Return JSON-compatible values."""
        left = [{**self._facts(finding), "why": why, "remedy": finding.remedy} for finding, why in self.by_hand]
        fixed = [self._facts(finding) for finding in self.fixed]
        return {"script": str(self.path), "diff": self.diff(), "fixed": fixed, "by_hand": left}

    def _facts(self, finding: Finding) -> dict[str, object]:
        return {"line": finding.line, "text": finding.text}

    def content(self) -> bytes:
        """Return the bytes of the new script."""
        return self.new.encode(self.encoding)


def corrections(runs: Sequence[Run]) -> list[Corrected]:
    """Return each script that runs have found something in, with its edits, in order of the first finding."""
    files: dict[str, list[Finding]] = {}
    for finding in findings(runs):
        files.setdefault(os.path.realpath(finding.file), []).append(finding)
    return [_corrected(_from_here(Path(file)), found) for file, found in files.items()]


def findings(runs: Sequence[Run]) -> Iterator[Finding]:
    """Yield what runs have found in lines that are known."""
    for mistake in distinct_mistakes(runs):
        if mistake.file:
            yield Finding(mistake.file, mistake.line, mistake.source, mistake.text, mistake.corrected, mistake)
    known: set[tuple[str, str]] = set()
    for one in (one for run in runs for one in diagnosed(run.diagnoses)):
        file, _, line = one.line.rpartition(":")
        if file and one.advice and (one.line, one.op) not in known:
            known.add((one.line, one.op))
            yield Finding(file, int(line), one.source, one.summary, one.advice, one)


def without_line(runs: Sequence[Run]) -> list[Diagnosed]:
    """Return what runs have diagnosed with a remedy and without a line, each once; not scales, which adapt."""
    known: dict[tuple[str, str, str], Diagnosed] = {}
    for one in (one for run in runs for one in diagnosed(run.diagnoses)):
        if one.advice and not one.line and not one.is_due_to_scale:
            known.setdefault((one.module, one.op, one.advice), one)
    return list(known.values())


def _from_here(path: Path) -> Path:
    try:
        return path.relative_to(os.path.realpath(os.getcwd()))
    except (OSError, ValueError):
        return path


def _corrected(path: Path, found: Iterable[Finding]) -> Corrected:
    found = sorted(found, key=lambda finding: finding.line)
    try:
        raw = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
        source = ScriptSource(text)
    except (OSError, MemoryError, RecursionError, SyntaxError, ValueError) as error:
        why = f"{path} cannot be read: {error.strerror if isinstance(error, OSError) else error}"
        return Corrected(path, by_hand=[(finding, why) for finding in found])
    if is_passed_over(os.path.abspath(path)) or {"site-packages", "dist-packages"} & set(path.parts):
        return Corrected(path, by_hand=[(finding, "it belongs to an installed package") for finding in found])
    corrected = Corrected(path, raw, encoding, text, text)
    ends = [source.end_of_line(finding.line) for finding in found]
    for place, finding in enumerate(found):
        fix = finding.fix(source, source.line_of(ends[place]))
        if fix == () and not corrected.edits:
            fix = "what the edit would add is there already"
        edited = fix if isinstance(fix, str) else _edited(source, fix)
        if isinstance(fix, str) or isinstance(edited, str):
            corrected = replace(corrected, by_hand=[*corrected.by_hand, (finding, str(edited))])
            continue
        # Of the lines that follow too; an insertion before a statement moves the end of its line.
        ends = [end + sum(change.moves(end) for change in fix) for end in ends]
        source, edits = edited, corrected.edits + bool(fix)
        corrected = replace(corrected, new=source.text, fixed=[*corrected.fixed, finding], edits=edits)
    return corrected


def _edited(source: ScriptSource, fix: Iterable[Change]) -> ScriptSource | str:
    """Return the script after changes, or why not if it would not be Python."""
    try:
        return ScriptSource(changed(source.text, fix))
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return "the edit would not be Python"


def _rows(text: str) -> list[str]:
    return list(io.StringIO(text, newline=""))
