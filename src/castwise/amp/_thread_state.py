"""A thread's state beyond autocast's switches: a policy sets it, and a nested region suspends it."""

from __future__ import annotations

import threading
from typing import Any


class _Thread(threading.local):
    # Set for each instance: torch.compile guards on attributes of a thread-local object, but not on those of its class.
    def __init__(self) -> None:
        self.token = object()  # unique to this thread, unlike its ident, which later threads may reuse
        self.state: Any = None


THREAD = _Thread()
