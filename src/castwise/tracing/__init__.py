"""Which op ran where, and in which precision: `castwise.trace`, and the dispatch mode and hooks behind it."""

from typing import TYPE_CHECKING

from castwise._faces import face

if TYPE_CHECKING:
    from castwise.tracing._trace_result import Cast, Op, Trace
    from castwise.tracing._tracing import trace
else:
    __getattr__, __dir__ = face(
        __name__,
        {
            "Cast": "_trace_result",
            "Op": "_trace_result",
            "Trace": "_trace_result",
            "trace": "_tracing",
        },
    )

__all__ = [
    "Cast",
    "Op",
    "Trace",
    "trace",
]
