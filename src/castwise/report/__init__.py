"""Reports on recorded runs: facts, advice, verdicts, figures, and the HTML page that shows them."""

from typing import TYPE_CHECKING

from castwise._faces import face

if TYPE_CHECKING:
    from castwise.report._html_report import write_report
    from castwise.report._verdicts import Advice, Severity, Verdict, verdict
else:
    __getattr__, __dir__ = face(
        __name__,
        {
            "Advice": "_verdicts",
            "Severity": "_verdicts",
            "Verdict": "_verdicts",
            "verdict": "_verdicts",
            "write_report": "_html_report",
        },
    )

__all__ = [
    "Advice",
    "Severity",
    "Verdict",
    "verdict",
    "write_report",
]
