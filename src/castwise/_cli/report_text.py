"""Output of `castwise report --text`, and the summary of `castwise run`."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from castwise._number_text import headroom, loss_text, percent, power_of_two, several
from castwise.monitor._recorded_run import Run
from castwise.report._advice import Severity
from castwise.report._html_report import labels
from castwise.report._run_facts import Ranges, RunFacts, shown
from castwise.report._verdicts import judge
from castwise.report._worst_modules import worst_modules

WORST_SHOWN = 6
STYLES: dict[Severity, str] = {"critical": "bold red", "warning": "yellow", "note": "cyan", "good": "green"}


def print_runs(runs: list[Run], console: Console) -> None:
    """Print a summary of each run."""
    for label, run in zip(labels([run.path for run in runs]), runs, strict=True):
        facts = RunFacts(run)
        console.rule(Text(label))
        console.print(_summary(facts))
        if facts.skips:
            console.print(_skips(facts))
        if worst_modules(facts):
            console.print(_worst(facts))
        for mistake in run.mistakes:
            text = f"{mistake.where}{mistake.text}"
            console.print(Text("mistake: ", style="bold red").append(text, style="default"))
            corrected = mistake.corrected.replace("\n", "\n           ")
            console.print(Text(f"  correct: {corrected}", style="dim"))
        for advice in judge(facts):
            line = Text(f"{advice.severity}: ", style=STYLES[advice.severity])
            console.print(line.append(advice.text, style="default"))
            numbers = "; ".join(f"{label}: {value}" for label, value in advice.shown_evidence())
            console.print(Text(f"  {numbers}", style="dim"))
            for diagnosed in advice.diagnosed:
                for detail in diagnosed.details.splitlines():
                    console.print(Text(f"  {diagnosed.at}: {detail}", style="dim"))


def print_summary(lines: Iterable[str]) -> None:
    """Print the lines of `Summary.lines` to standard error, with colors if it is a terminal."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    for line in lines:
        text = Text(f"castwise: {line}")
        for severity, style in STYLES.items():
            text.highlight_regex(rf"^castwise: {severity}:", style)
        text.highlight_regex(r"(?m)^ {14}.*$", "bold")  # source code
        console.print(text)


def _summary(facts: RunFacts) -> str:
    parts = [several(len(facts.run.steps), "step"), f"{facts.skipped:,} skipped"]
    if facts.scales:
        scales = [scale for _, scale in facts.scales]
        span = f"from {power_of_two(min(scales))} to {power_of_two(max(scales))}"
        parts.append(f"scale {power_of_two(scales[-1])}, {span}")
    if facts.losses:
        parts.append(f"loss {loss_text(facts.losses[-1])}, first {loss_text(facts.losses[0])}")
    parts.append(several(len(facts.run.samples), "sample"))
    if facts.computes_in == "bf16":
        parts.append("computed in bf16")
    if facts.run.lost:
        parts.append(f"{several(facts.run.lost, 'record')} lost, because the disk was full")
    parts += [f"from step {alone.step:,} on, ranks are not recorded together: {alone.why}" for alone in facts.run.alone]
    return "; ".join(parts)


def _skips(facts: RunFacts) -> Table:
    table = _table("Skipped for", "steps", "first", "last", "not finite", right={1, 2, 3})
    for skips in facts.skips:
        names = ", ".join(name for name, _ in skips.parameters[:3])
        ends = (f"{step:,}" for step in (skips.steps[0], skips.steps[-1]))
        table.add_row(Text(skips.cause + skips.where), f"{len(skips.steps):,}", *ends, Text(names))
    return table


def _worst(facts: RunFacts) -> Table:
    table = _table("Worst modules, in fp16", "headroom", "underflow", "outputs' headroom", right={1, 2, 3})
    for module in worst_modules(facts)[:WORST_SHOWN]:
        gradients, outputs = module.gradients, module.outputs
        table.add_row(
            Text(shown(module.name)).append(" (diagnosed)" if module.is_diagnosed else "", style="bold red"),
            _least_headroom(gradients),
            percent(gradients.mean_flush) if gradients and gradients.samples else "",
            _least_headroom(outputs),
        )
    return table


def _least_headroom(ranges: Ranges | None) -> str:
    if ranges is None:
        return ""
    return headroom(ranges.headroom_bits) if ranges.samples else "none finite"


def _table(*columns: str, right: set[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number in right else "left", overflow="fold")
    return table
