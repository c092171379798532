"""The final table, its footnotes and its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from castwise._demo.training import Result

COLUMNS = ("precision", "library", "loss", "ms/step", "tokens/s", "memory", "bytes", "skips", "identical")
FOOTNOTES = """\
loss: final loss on held-out text, in nats per byte. ms/step: median. memory: peak above the start.
bytes: per parameter of linear layers, for weight, autocast's copy, gradient and optimizer state.
skips: steps whose gradients overflowed. identical: all losses and final weights are, bit for bit, those above."""


def print_results(
    console: Console, results: Sequence[Result], identical: Mapping[str, bool], emulated: Sequence[str]
) -> None:
    """Print a row per training run, the meaning of the columns, and the verdict.

    Args:
        console: The console.
        results: The rows; the first one of each precision is the reference of the others.
        identical: By name, whether a run ended with the bits of its reference.
        emulated: Precisions that were trained with a smaller model.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=0)  # nine columns must fit into 80 characters
    for column in COLUMNS:
        is_text = column in {"precision", "library", "identical"}
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for result in results:
        same = identical.get(result.training.name)
        table.add_row(
            result.training.precision + ("*" if result.training.precision in emulated else ""),
            result.training.library,
            f"{result.loss:.4f}",
            f"{result.step_ms:.1f}",
            f"{result.tokens_per_s:,.0f}",
            "-" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.0f} MiB",
            f"{result.stored_bytes:.1f}",
            str(result.skipped),
            "" if same is None else "yes" if same else "NO",
        )
    console.print(table)
    console.print(FOOTNOTES)
    slow = [precision for precision in emulated if precision in {result.training.precision for result in results}]
    if slow:
        console.print(f"* {' and '.join(slow)}: emulated by this CPU, so trained with a much smaller model.")
    different = [name for name, same in identical.items() if not same]
    if different:
        console.print(f"DIFFERENT BITS: {', '.join(different)}.")
    else:
        console.print("All losses and weights are bit-identical.")
