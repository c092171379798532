"""Repeat the fp16 training run under a monitor and write its report."""

from __future__ import annotations

from pathlib import Path

from castwise._files import refuse_foreign
from castwise.demo.run_folder import cannot_write
from castwise.demo.training import Trainer
from castwise.monitor.record_file import file_in, is_record
from castwise.monitor.run import Run

SAMPLE_EVERY = 5
REPORT = "report.html"


def train_under_monitor(folder: Path, trainer: Trainer) -> str:
    """Train from first to last step and record the run in its folder, replacing earlier records.

    Returns:
        The digest of the weights, which the monitor must not change.

    Raises:
        UserError: The records cannot be replaced, or are not castwise's.
    """
    file = file_in(folder)
    try:
        refuse_foreign(file, "a record", is_record)
        file.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(file, error) from error
    with trainer.monitor(SAMPLE_EVERY, folder):
        while trainer.steps_done < trainer.training.steps:
            trainer.step()
    return trainer.digest()


def report(folder: Path) -> str:
    """Write the report for a run's folder, and return its path, or the reason why there is none.

    Raises:
        UserError: The report cannot be written.
    """
    from castwise.report.report import write_report

    try:
        return str(write_report([Run.read(folder)], folder / REPORT))
    except ImportError as error:
        return str(error)
    except OSError as error:
        raise cannot_write(folder / REPORT, error) from error
