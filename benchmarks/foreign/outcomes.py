"""A plugin of pytest that notes what became of each test."""

from __future__ import annotations

from typing import Any

import facts


def pytest_runtest_logreport(report: Any) -> None:
    """Note the outcome of a test; why it failed or was skipped with it."""
    if report.when == "call" or not report.passed:
        crash = getattr(report.longrepr, "reprcrash", None)
        skipped = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        reason = " ".join((crash.message if crash else skipped).split())
        facts.put(report.nodeid, f"{report.outcome}: {reason}" if reason else report.outcome)


def pytest_collectreport(report: Any) -> None:
    """Note a file whose tests could not be collected."""
    if report.failed:
        facts.put(f"collecting {report.nodeid}", f"error: {str(report.longrepr).splitlines()[-1]}")
