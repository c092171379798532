"""What happened to the numbers: the fp16 training once more, under a monitor, and a report of it."""

from __future__ import annotations

from pathlib import Path

from castwise.demo.run_folder import cannot_write
from castwise.demo.training import Trainer
from castwise.monitor.run import Run
from castwise.monitor.sinks import file_in

SAMPLE_EVERY = 5
REPORT = "report.html"


def train_under_monitor(folder: Path, trainer: Trainer) -> str:
    """Train from the first step to the last, and record it in a run's folder, instead of what is there.

    Returns:
        The digest of the weights: a monitor changes none.
    """
    file_in(folder).unlink(missing_ok=True)
    with trainer.monitor(SAMPLE_EVERY, folder):
        while trainer.steps_done < trainer.training.steps:
            trainer.step()
    return trainer.digest()


def report(folder: Path) -> str:
    """Write the report of what was recorded in a run's folder, and return where it is, or what is missing for it.

    Raises:
        UserError: It cannot be written.
    """
    from castwise.report.report import write_report

    try:
        return str(write_report([Run.read(folder)], folder / REPORT))
    except ImportError as error:
        return str(error)
    except OSError as error:
        raise cannot_write(folder / REPORT, error) from error
