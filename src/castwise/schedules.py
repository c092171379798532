"""How the scale of a `GradScaler` moves: `GradScaler("cuda", schedule=castwise.schedules.Headroom())`.

* `Dynamic`: grows after a run of finite steps, backs off after a non-finite one; with its defaults it is torch's.
* `Headroom`: follows the largest gradient that is seen, and moves before anything overflows.
* `Static`: never moves.
* `Guard`: is 1. For bf16 and fp32, where nothing needs scaling but a bad step should be skipped and explained.

`simulate` replays a recorded run through any of them: `castwise.monitor.run.Run.gradient_ranges` is one, `write_trace`
and `read_trace` keep it in a file.
"""

from castwise.amp.schedules import Dynamic, Guard, Headroom, Schedule, Static
from castwise.amp.simulation import GradientRange, Simulation, read_trace, simulate, write_trace

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
