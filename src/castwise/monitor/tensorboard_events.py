"""Records as curves, histograms and texts of TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes records as TensorBoard events: needs the extra `castwise[tensorboard]`.

    Curves of each step are `step/scale`, `step/loss`, `step/grad_norm`, `step/seconds` and `step/skipped` (0 or 1). At
    sampled steps there are, for each module, `flush <format>/<module>`, `headroom_bits <format>/<module>` and the
    histogram `log2 gradient/<module>` of its gradients, `activation flush <format>/<module>` and
    `activation headroom_bits <format>/<module>` of its outputs, and for each parameter
    `update_to_weight/<parameter>` and `lost_in_bf16/<parameter>`. Diagnoses are texts.

    Args:
        folder: Where the event files go; made when the first record comes.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if find_spec("tensorboard") is None:
            raise ModuleNotFoundError("the TensorBoard sink needs tensorboard: pip install 'castwise[tensorboard]'")
        self._folder = Path(folder)
        self._writer: Any = None

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Write a record."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        write = {
            "run": self._write_run,
            "step": self._write_step,
            "sample": self._write_sample,
            "diagnosis": self._write_diagnosis,
        }.get(record["kind"])
        if write is not None:
            write(record)
        if record["kind"] != "step":
            self._writer.flush()

    def close(self) -> None:
        """Write what is left, and let go of the file; a later record begins another one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_run(self, record: Mapping[str, Any]) -> None:
        rows = [f"|{name}|{value}|" for name, value in record["settings"].items()]
        self._writer.add_text("settings", "\n".join(["|setting|value|", "|---|---|", *rows]))

    def _write_step(self, record: Mapping[str, Any]) -> None:
        for name in ("scale", "loss", "grad_norm", "seconds", "skipped"):
            if record[name] is not None:
                self._writer.add_scalar(f"step/{name}", float(record[name]), record["step"])
        if record["skipped"]:
            self._writer.add_text("skipped", f"{record['cause']} {' '.join(record['parameters'])}", record["step"])

    def _write_sample(self, record: Mapping[str, Any]) -> None:
        for name, value in curves(record):
            self._writer.add_scalar(name, value, record["step"])
        for module, statistics in record["modules"].items():
            self._write_histogram(f"log2 gradient/{module}", statistics["exponents"], record["step"])

    def _write_histogram(self, name: str, exponents: Mapping[str, Any], step: int) -> None:
        counts, lowest = exponents["counts"], exponents["lowest"]
        if not counts:
            return
        middles = [lowest + index + 0.5 for index in range(len(counts))]
        self._writer.add_histogram_raw(
            name,
            min=lowest,
            max=lowest + len(counts),
            num=sum(counts),
            sum=sum(n * middle for n, middle in zip(counts, middles, strict=True)),
            sum_squares=sum(n * middle**2 for n, middle in zip(counts, middles, strict=True)),
            bucket_limits=[lowest + index + 1 for index in range(len(counts))],
            bucket_counts=counts,
            global_step=step,
        )

    def _write_diagnosis(self, record: Mapping[str, Any]) -> None:
        self._writer.add_text("diagnosis", f"{record['text']}\n\n{record['advice']}", record["step"])


def curves(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each curve that a sample adds to."""
    for prefix, kind in (("", "modules"), ("activation ", "activations")):
        for module, statistics in record[kind].items():
            for number_format, fit in statistics["formats"].items():
                for name in ("flush", "headroom_bits"):
                    yield f"{prefix}{name} {number_format}/{module}", fit[name]
    for parameter, facts in record["weights"].items():
        for name, value in facts.items():
            yield f"{name}/{parameter}", value
