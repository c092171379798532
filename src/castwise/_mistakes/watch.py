"""`Watch`: observe a training script and report each of its mistakes once."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from typing import Any
from weakref import WeakMethod, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from castwise._guard import ErrorBoundary, guarded
from castwise._mistakes.accumulation import Accumulation
from castwise._mistakes.backwards import Backwards
from castwise._mistakes.checkpoints import Checkpoints
from castwise._mistakes.compiled_regions import CompiledRegions
from castwise._mistakes.finder import Finder
from castwise._mistakes.graph import leaves_of
from castwise._mistakes.learning_rates import LearningRates
from castwise._mistakes.losses import Losses
from castwise._mistakes.low_weights import LowWeights
from castwise._mistakes.mistake import Mistake, Place
from castwise._mistakes.recomputation import Recomputation
from castwise._mistakes.regions import Regions
from castwise._mistakes.scalers import Scalers
from castwise._mistakes.scalings import Scalings
from castwise._mistakes.script_line import ScriptLine
from castwise._mistakes.unscaling import Unscaling
from castwise._mistakes.validation import Validation
from castwise._mistakes.zeroing import Zeroing
from castwise._torch_private import at_the_end_of_this_backward, never_traced
from castwise.amp._observers import OBSERVERS, Observer
from castwise.amp._outcomes import StepFacts

# Iterations that are checked closely: the first _FIRST, then the first and the last of every _EVERY, where scripts run
# their periodic work.
_FIRST, _EVERY = 12, 50
_FINDERS: tuple[type[Finder], ...] = (
    *(Scalers, Regions, Losses, Scalings, Backwards, Unscaling, Accumulation, Checkpoints, LearningRates),
    *(Validation, LowWeights, CompiledRegions, Zeroing, Recomputation),
)
_PER_KIND = 3  # places reported per kind of mistake

_EVENTS = [name for name in dir(Finder) if not name.startswith("_") and name not in ("turn_off", "stop")]

Subscriber = Callable[[Mistake], object]
Correction = Callable[[ScriptLine], str]


class MixedPrecisionMistake(UserWarning):
    """A mixed-precision mistake in a training script."""

    __module__ = "castwise"  # where users find it, as a traceback shows it


def _to_finders(event: str) -> Any:
    """Return a method of `Watch` that passes an event on to the finders."""

    def pass_on(self: Watch, *args: Any, **kwargs: Any) -> None:
        self._each(event, *args, **kwargs)

    pass_on.__name__, pass_on.__qualname__ = event, f"Watch.{event}"  # by which the guard counts failures
    return guarded(pass_on)


class Watch(Observer):
    """Reports mistakes to its subscribers. Each `Finder` looks for one kind.

    A watch does not change results and never ends a run. A finder that fails is turned off with a warning, because it
    would report mistakes that are none if it had missed an event; if the watch itself fails, all are.
    """

    def __init__(self) -> None:
        self._subscribers: list[WeakMethod[Subscriber]] = []
        self._gradient_subscribers: list[WeakMethod[Subscriber]] = []
        self._forget()

    def _forget(self) -> None:
        text = "castwise does not look for mistakes any more, because the watch failed"
        self._guard = ErrorBoundary(text, is_final=True, on_closed=self._turn_off)
        self.found: list[Mistake] = []
        self.warns = True
        """Whether to warn of each mistake."""
        self.has_scaled = False
        """Whether an enabled scaler has scaled a loss."""
        self.is_stepping = False
        """Whether `step` of an enabled scaler is running."""
        self.is_by_hand = False
        """Whether the script asked for the scale in this iteration, and so may scale or unscale by hand."""
        self._ticks = 0
        self._thread: int | None = None
        self._finders: list[Finder] = []
        self._listening: dict[str, list[Finder]] = {}
        self._handles: list[Any] = []
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._scalers: WeakSet[Any] = WeakSet()

    # -- beginning and end --------------------------------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber, *, of_gradients: bool = False) -> None:
        """Add a subscriber and report all mistakes to it, including earlier ones. The first one starts the watch.

        Args:
            subscriber: A bound method; its object is not kept alive.
            of_gradients: Also check how scaled gradients are used, which changes their class temporarily.
        """
        if not self._subscribers:
            self._start()
        self._subscribers.append(WeakMethod(subscriber, self._end_without_subscribers))
        if of_gradients:
            self._gradient_subscribers.append(self._subscribers[-1])
        for mistake in self.found:
            subscriber(mistake)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Report pending mistakes and remove a subscriber. The watch stops if it was the last."""
        if subscriber in [reference() for reference in self._subscribers]:
            with self._guard:  # the subscriber is removed anyway
                self._each("ending")
            self._subscribers = [reference for reference in self._subscribers if reference() not in (None, subscriber)]
            self._end_without_subscribers()

    def stop(self) -> None:
        """Report pending mistakes and remove all subscribers."""
        with self._guard:
            self._each("ending")
        self._subscribers = []
        self._end_without_subscribers()

    def _end_without_subscribers(self, gone: object = None) -> None:
        self._subscribers = [reference for reference in self._subscribers if reference is not gone]
        if not self._subscribers and self in OBSERVERS:
            OBSERVERS.remove(self)
            atexit.unregister(self._at_exit)
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._turn_off()

    def _turn_off(self) -> None:
        for finder in self._finders:
            finder.turn_off()

    def _start(self) -> None:
        self._forget()
        self._at_exit = self._guard.door(self.stop)
        atexit.register(self._at_exit)  # while the weak references are still usable
        self._finders = [kind(self) for kind in _FINDERS]
        self._listening = {event: [finder for finder in self._finders if _listens(finder, event)] for event in _EVENTS}
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        OBSERVERS.append(self)

    # -- called by finders --------------------------------------------------------------------------------------

    @property
    def is_looking(self) -> bool:
        """Whether this iteration is checked closely."""
        return self._ticks < _FIRST or self._ticks % _EVERY in (0, _EVERY - 1)

    @property
    def may_change_gradients(self) -> bool:
        """Whether scaled gradients may change class temporarily, because castwise is installed."""
        return any(subscriber in self._subscribers for subscriber in self._gradient_subscribers)

    def report(self, name: str, text: str, corrected: str | Correction, place: Place | None) -> None:
        """Report a mistake, unless it was reported before.

        Args:
            name: Its kind.
            text: The mistake and its consequence.
            corrected: The remedy in words, or a function that returns the corrected code for a line of a script.
            place: The line; None if it is not known.
        """
        earlier = [mistake_before for mistake_before in self.found if mistake_before.name == name]
        if len(earlier) >= _PER_KIND or any(mistake_before.place == place for mistake_before in earlier):
            return
        code = corrected(ScriptLine(place)) if callable(corrected) else corrected
        mistake = Mistake(name, text, code, place)
        self.found.append(mistake)
        for reference in tuple(self._subscribers):
            if (subscriber := reference()) is not None:
                with self._guard:
                    subscriber(mistake)
        if not self.warns:
            return
        file, line = ("<unknown>", 0) if place is None else (place.file, place.line)
        with suppress(MixedPrecisionMistake):  # where warnings are errors
            warnings.warn_explicit(mistake.message(), MixedPrecisionMistake, file, line)

    # -- events: see `Observer` and `Finder` --------------------------------------------------------------------

    model_found, file_saved, state_loaded = map(_to_finders, ("model_found", "file_saved", "state_loaded"))
    file_written, file_read = map(_to_finders, ("file_written", "file_read"))
    scaler_created, saving, loaded = map(_to_finders, ("scaler_created", "saving", "loaded"))
    entered, left, compiled = map(_to_finders, ("entered", "left", "compiled"))
    advanced, skipped, judged = map(_to_finders, ("advanced", "skipped", "judged"))
    will_draw_again = _to_finders("will_draw_again")

    @guarded
    def scaled(self, scaler: Any, loss: torch.Tensor, scaled: torch.Tensor) -> None:
        """Notify the finders, and hook the start of the loss's backward."""
        if self._is_elsewhere():
            return
        self.has_scaled = True
        self._each("scaled", scaler, loss, scaled)
        if scaled.requires_grad and self.is_looking:
            self._look_out_for_backward(scaler, scaled)

    def _look_out_for_backward(self, scaler: Any, scaled: torch.Tensor) -> None:
        leaves = leaves_of(scaled)

        def start(_: torch.Tensor) -> None:
            self._tell("backward_starts", leaves)
            at_the_end_of_this_backward(self._guard.door(lambda: self._tell("backward_ended", leaves, scaler)))

        scaled.register_hook(self._guard.door(start))  # type: ignore[no-untyped-call]  # torch's

    @guarded
    def reading_scale(self, scaler: Any) -> None:
        """Record that the script asked for the scale, and notify the finders."""
        if not self._is_elsewhere():
            self.is_by_hand = True
            self._each("reading_scale", scaler)

    @guarded
    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Notify the finders, unless the scaler unscales as part of its step."""
        if not self.is_stepping and not self._is_elsewhere():
            self._register(optimizer)
            self._each("unscaling", scaler, optimizer)

    @guarded
    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Notify the finders."""
        if self._is_elsewhere():
            return
        self._register(optimizer)
        self.is_stepping = scaler.is_enabled()
        if scaler not in self._scalers:
            self._scalers.add(scaler)
            self._handles.append(scaler.register_step_hook(self._step_resolved))
        self._each("stepping", scaler, optimizer)

    @guarded
    def stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Notify the finders."""
        if not self._is_elsewhere():
            self.is_stepping = False
            self._each("stepped", scaler, optimizer)

    @guarded
    def updating(self, scaler: Any, *, is_set: bool) -> None:
        """Notify the finders of the update, and that the iteration ends."""
        if not self._is_elsewhere():
            self._each("updating", scaler, is_set=is_set)
            self._tick()

    @guarded
    def _step_resolved(self, facts: StepFacts) -> None:
        self._each("step_resolved", facts)

    @guarded
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._is_elsewhere():
            self._register(optimizer)
            self._tell("optimizer_steps", optimizer)

    @guarded
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self.is_stepping and not self._is_elsewhere():
            self._tell("optimizer_stepped_alone", optimizer)
            self._tick()

    def _register(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._optimizers:
            self._thread = self._thread or get_ident()
            self._optimizers.add(optimizer)
            self._each("optimizer_found", optimizer)

    def _tick(self) -> None:
        self._ticks += 1
        self._tell("ticked")
        self.is_by_hand = False

    @never_traced
    def _is_elsewhere(self) -> bool:
        """Return True in a thread other than the first one that trains, which is the only one checked."""
        return self._thread is not None and self._thread != get_ident()

    def _each(self, event: str, *args: Any, **kwargs: Any) -> None:
        if not self._is_elsewhere():
            self._tell(event, *args, **kwargs)

    @never_traced  # by Dynamo, which after a graph break would trace these calls
    def _tell(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Notify the finders, from any thread."""
        for finder in self._listening.get(event, ()):
            if not finder._guard.is_closed:
                try:  # not `call`, which would be a function more for each finder in each step
                    getattr(finder, event)(*args, **kwargs)
                except Exception as error:
                    finder._guard.failed(getattr(finder, event), error)


def _listens(finder: Finder, event: str) -> bool:
    return getattr(type(finder), event) is not getattr(Finder, event)


WATCH = Watch()
"""The watch of this process. Its hooks observe all training in the process."""
