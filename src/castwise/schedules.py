"""Schedules for the scale of a `GradScaler`: `GradScaler("cuda", schedule=castwise.schedules.Headroom())`.

* `Dynamic`: grows after a run of finite steps, backs off after a non-finite one. The defaults match torch's scaler.
* `Headroom`: follows the largest gradient, and moves before anything overflows.
* `Static`: never moves.
* `Guard`: stays at 1, for bf16 and fp32, which need no scaling. Bad steps are still skipped and explained.

`simulate` replays a recorded run through any of them. `castwise.monitor.Run.gradient_ranges` is such a recording;
`write_trace` and `read_trace` store it in a file.
"""

from castwise.amp._schedules import Dynamic, Guard, Headroom, Schedule, Static
from castwise.amp._simulation import GradientRange, Simulation, read_trace, simulate, write_trace

__all__ = [
    "Dynamic",
    "GradientRange",
    "Guard",
    "Headroom",
    "Schedule",
    "Simulation",
    "Static",
    "read_trace",
    "simulate",
    "write_trace",
]
