"""The table at the end and the sentences that keep it from being misread."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from castwise.demo.comparison import verdicts
from castwise.demo.hardware import PRECISIONS
from castwise.demo.settings import CASTWISE, Settings
from castwise.demo.training import Result

_COLUMNS = ("precision", "library", "steps", "loss", "ms/step", "tokens/s", "memory", "skipped", "identical")
_TEXT_COLUMNS = {"precision", "library", "identical"}


def print_results(console: Console, settings: Settings, results: list[Result]) -> None:
    """Print a row per training, what the columns mean, and the verdict."""
    identical = verdicts(results)
    table = Table(box=box.SIMPLE_HEAD, padding=0)  # nine columns in a terminal of 80
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _TEXT_COLUMNS else "right", no_wrap=True)
    for result in sorted(results, key=_torch_first):
        table.add_row(*_cells(result, settings, identical))
    console.print(table)
    for line in _footnotes(settings):
        console.print(line)
    console.print(_verdict(identical))


def _torch_first(result: Result) -> tuple[int, bool]:
    """The order of reading; the order of training alternates."""
    return list(PRECISIONS).index(result.precision), result.library == CASTWISE


def _cells(result: Result, settings: Settings, identical: dict[str, bool]) -> tuple[str, ...]:
    mark = "*" if result.precision in settings.emulated else ""
    same = ("yes" if identical[result.precision] else "NO") if result.library == CASTWISE else ""
    return (
        result.precision + mark,
        result.library,
        str(result.steps),
        f"{result.loss:.4f}",
        f"{result.step_ms:.1f}",
        f"{result.tokens_per_s:,.0f}",
        "-" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.0f} MiB",
        str(result.skipped),
        same,
    )


def _footnotes(settings: Settings) -> list[str]:
    lines = [
        "loss: on held-out text at the end, in nats per byte. ms/step: median.",
        "memory: peak over that at the start. skipped: steps whose gradients overflowed.",
        "identical: weights bit for bit those of torch.amp.",
    ]
    if settings.emulated:
        lines.append(f"* {' and '.join(settings.emulated)}: very slow on this CPU, so trained on a much smaller model.")
    return lines


def _verdict(identical: dict[str, bool]) -> str:
    different = [precision for precision, same in identical.items() if not same]
    if different:
        return f"castwise and torch.amp DIFFER in {', '.join(different)}."
    return "castwise and torch.amp ended with bit-identical weights."
