"""What holds in a thread beyond autocast's switches: a policy puts it there, and a region within suspends it."""

from __future__ import annotations

import threading
from typing import Any


class _Thread(threading.local):
    # Set for each instance: torch.compile guards on attributes of a thread-local object, but not on those of its class.
    def __init__(self) -> None:
        self.token = object()  # of this thread alone: idents are given again to later threads
        self.state: Any = None


THREAD = _Thread()
