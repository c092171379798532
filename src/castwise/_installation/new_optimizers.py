"""`NewOptimizers`: be notified of each optimizer that a script creates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from castwise._guard import ErrorBoundary

MOST = 16
"""The number of optimizers after which the next ones are not reported, because looking for a model takes 50 ms."""


class NewOptimizers:
    """Replaces `torch.optim.Optimizer.__init__` to call a function after it.

    Args:
        on_made: Called with each new optimizer. Its model may be wrapped later.
        guard: Catches its errors.
    """

    def __init__(self, on_made: Callable[[Optimizer], object], guard: ErrorBoundary) -> None:
        self._on_made, self._guard = on_made, guard
        self._count = 0
        self._init: Any = None

    def begin(self) -> None:
        """Replace it."""
        self._init = init = Optimizer.__init__

        @functools.wraps(init)
        def observed(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._count += 1
            if self._count <= MOST:
                self._guard.call(self._on_made, optimizer)

        self._observed = observed
        Optimizer.__init__ = observed  # type: ignore[method-assign,assignment]  # on purpose

    def end(self) -> None:
        """Put it back, unless it was changed since."""
        if self._init is not None and Optimizer.__init__ is self._observed:
            Optimizer.__init__ = self._init  # type: ignore[method-assign]  # on purpose
        self._init = None
