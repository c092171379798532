"""The final table, its footnotes and its verdict."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from castwise.demo.comparison import verdicts
from castwise.demo.hardware import PRECISIONS
from castwise.demo.settings import CASTWISE, FP32, Settings
from castwise.demo.training import Result

_COLUMNS = ("precision", "library", "steps", "loss", "ms/step", "tokens/s", "memory", "skipped", "identical")
_WEIGHTS_COLUMNS = ("weights", "steps", "loss", "ms/step", "tokens/s", "memory", "bytes", "identical")
_LOSS = "loss: final loss on held-out text, in nats per byte. ms/step: median."
_SLOW = "very slow on this CPU, so trained with a much smaller model."
_TEXT_COLUMNS = {"precision", "library", "weights", "identical"}


def print_results(console: Console, settings: Settings, results: list[Result]) -> None:
    """Print a row per training run, the meaning of the columns, and the verdict."""
    identical = verdicts(results)
    if settings.weights == FP32:
        rows = [_cells(result, settings, identical) for result in sorted(results, key=_torch_first)]
        _print_table(console, _COLUMNS, rows)
        lines = [*_footnotes(settings), _verdict(identical)]
    else:
        _print_table(console, _WEIGHTS_COLUMNS, [_cells_by_weights(result, settings, identical) for result in results])
        lines = [*_footnotes_of_weights(settings), *_verdicts_of_weights(identical)]
    for line in lines:
        console.print(line)


def _print_table(console: Console, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=0)  # nine columns must fit into 80 characters
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXT_COLUMNS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _torch_first(result: Result) -> tuple[int, bool]:
    """Return a sort key that puts torch.amp first; the order of training alternates."""
    return list(PRECISIONS).index(result.precision), result.library == CASTWISE


def _cells(result: Result, settings: Settings, identical: dict[str, bool]) -> tuple[str, ...]:
    mark = "*" if result.precision in settings.emulated else ""
    same = ("yes" if identical[result.precision] else "NO") if result.library == CASTWISE else ""
    return result.precision + mark, result.library, *_numbers(result), str(result.skipped), same


def _cells_by_weights(result: Result, settings: Settings, identical: dict[str, bool]) -> tuple[str, ...]:
    mark = "*" if result.precision in settings.emulated else ""
    same = ("yes" if identical[result.weights] else "NO") if result.weights in identical else ""
    return result.weights + mark, *_numbers(result), f"{result.stored_bytes:.1f}", same


def _numbers(result: Result) -> tuple[str, ...]:
    return (
        str(result.steps),
        f"{result.loss:.4f}",
        f"{result.step_ms:.1f}",
        f"{result.tokens_per_s:,.0f}",
        "-" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.0f} MiB",
    )


def _footnotes(settings: Settings) -> list[str]:
    lines = [
        _LOSS,
        "memory: peak above the start. skipped: steps whose gradients overflowed.",
        "identical: weights bit-identical to torch.amp's.",
    ]
    if settings.emulated:
        lines.append(f"* {' and '.join(settings.emulated)}: {_SLOW}")
    return lines


def _footnotes_of_weights(settings: Settings) -> list[str]:
    lines = [
        f"{_LOSS} memory: peak above the start.",
        "bytes: per parameter of linear layers, for weight, autocast's copy, gradient and optimizer state.",
        "identical: every step's loss and all weights, in fp32, bit-identical to training with fp32 weights.",
    ]
    return [*lines, f"* bf16: {_SLOW}"] if "bf16" in settings.emulated else lines


def _verdicts_of_weights(identical: dict[str, bool]) -> list[str]:
    return [f"{name}: bit-identical to fp32 weights: {'yes' if same else 'NO'}" for name, same in identical.items()]


def _verdict(identical: dict[str, bool]) -> str:
    different = [precision for precision, same in identical.items() if not same]
    if different:
        return f"castwise and torch.amp DIFFER in {', '.join(different)}."
    return "castwise and torch.amp ended with bit-identical weights."
