"""`Termination`: write the report when SIGTERM ends a run, as Slurm, torchrun and Kubernetes do to preempt it.

Python runs signal handlers in the main thread between two instructions, so none runs while that thread waits in a
collective. But the signal's number is written to the wakeup file descriptor at once, and a thread that reads from it
can act.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

SECONDS = 10.0
"""Longest time between the signal and the end of the process; Slurm and torchrun kill it after 30."""


class Termination:
    """Calls a function when SIGTERM arrives, and then ends the process as the signal's default does.

    Does nothing if SIGTERM is handled or ignored already, once the script has set a handler of its own, in forked
    processes, and on Windows. If the script sets a wakeup file descriptor, as `loop.add_signal_handler` of asyncio
    does, the signal is noticed when the main thread next runs Python code.

    Args:
        write: Called once, in a thread of its own. It must not wait for the main thread, a device or other ranks.
    """

    def __init__(self, write: Callable[[], object]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._asked, self._done = threading.Event(), threading.Event()
        self._reads = self._writes = -1
        self._held = threading.local()

    def watch(self) -> None:
        """Start waiting for the signal. Must be called in the main thread."""
        if os.name != "posix" or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        # Both threads start now, because none can be started while Python exits.
        for run in (self._wait, self._write_when_asked):
            threading.Thread(target=run, name="castwise", daemon=True).start()
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._forget)
        before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
        signal.signal(signal.SIGTERM, self._on_signal)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Run the block, which ends the run, unless the signal has come before; then wait to be ended."""
        if self._asked.is_set():
            self._done.wait(SECONDS)
            _end_by_default()
        with self._lock:
            yield
            self._done.set()

    @property
    def _is_ours(self) -> bool:
        """Whether the script has left the handler in place. A handler of its own may call this one."""
        return signal.getsignal(signal.SIGTERM) == self._on_signal

    def _on_signal(self, *_: object) -> None:
        # Without this handler the signal would end the process at once. The descriptor may be the script's by now.
        if self._is_ours:
            try:
                os.write(self._writes, bytes([signal.SIGTERM]))
            except BlockingIOError:
                pass  # it is full of signals that will be read
            except OSError:  # the script has closed all files, as daemons do
                _end_by_default()

    def _wait(self) -> None:
        try:
            while not (signal.SIGTERM in os.read(self._reads, 4096) and self._is_ours):
                pass
        except OSError:  # closed by the script
            if self._is_ours:
                _restore_default()
            return
        self._asked.set()
        self._done.wait(SECONDS)
        _end_by_default()

    def _write_when_asked(self) -> None:
        self._asked.wait()
        with self._lock, suppress(Exception):
            if not self._done.is_set():
                self._write()
        self._done.set()

    def _hold(self) -> None:
        # A signal to the new process waits for `_forget`: before, it would be taken for one to this process.
        self._held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._held.mask)

    def _forget(self) -> None:
        """Let a forked process, such as a worker of a DataLoader, end by the signal as it does without castwise."""
        if self._is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._writes):
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        self._release()


def _end_by_default() -> None:
    """End the process by SIGTERM, from any thread."""
    _restore_default()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # to this thread: it ends the process at once
    os._exit(128 + signal.SIGTERM)  # the signal is blocked


def _restore_default() -> None:
    # `signal.signal` works in the main thread only, and the main thread may be blocked.
    restore = ctypes.pythonapi.PyOS_setsig
    restore.argtypes, restore.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    restore(signal.SIGTERM, None)
