"""`replicas-differ`, `gradients-not-reduced`, `same-data-on-ranks`: what ranks that train one model hold and see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from castwise._digests import digest
from castwise._invariants.board import Board
from castwise._invariants.data_parallel import DataParallel, data_parallel, summed_in_16_bits
from castwise._invariants.invariant import Exemptions, Violation
from castwise._invariants.torch_calls import TORCH_CALLS
from castwise._invariants.weights_of_steps import Differ, WeightsOfSteps
from castwise._number_text import several
from castwise.amp._devices import is_capturing
from castwise.amp._gradients import params_of
from castwise.amp._readback import DELAY, Readback

_READ_EVERY = 5  # steps
_KEPT = 8  # checks of which a rank waits for the other's
_SAME_BATCHES = 2  # checks
_TENSORS = 16  # of a batch
_WEIGHTS, _GRADIENTS, _BATCHES = "weights", "gradients", "batches"
_KINDS = _GRADIENTS, _WEIGHTS, _BATCHES
_UNKNOWN = 0  # the digest of what a rank has not seen


class _Digests(NamedTuple):
    """The digests of a rank before a step: of each parameter, of each gradient, and of the batch."""

    of: Mapping[str, Sequence[int]]

    def total(self, kind: str) -> int:
        """Return one number of eight bytes for all digests of a kind."""
        words = torch.tensor([*self.of[kind], 0])
        return int(digest(words).item()) if any(self.of[kind]) else _UNKNOWN


class _Broken(NamedTuple):
    """What a rank writes that differs: the check, the one before at which it did not, and numbers of the parameters."""

    rank: int
    step: int
    since: int
    bypassed: int
    weights: Differ
    numbers: Sequence[int]

    def __str__(self) -> str:
        return " ".join(map(str, [*self[:4], *self.weights, *self.numbers]))

    @classmethod
    def parsed(cls, text: str) -> _Broken:
        """Return what a rank has written."""
        rank, step, since, bypassed, equal, apart, *numbers = map(int, text.split())
        return cls(rank, step, since, bypassed, Differ(equal, apart), numbers)


class EqualRanks:
    """Compares digests of weights, gradients and batches between ranks that train one model.

    Each rank computes its digests at the same steps. The first writes its own on a `Board`; the others read them at
    later steps, and write what differs, which the first reports. A rank that does not take part is not compared.

    Args:
        model: The model, or its wrapper.
        parameters: Returns the model's parameters by name.
        optimizer: The optimizer before whose steps they are compared.
        exemptions: What is not compared, the same on all ranks.
        each_step: Whether to tell at which step weights began to differ, and not only between which checks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        optimizer: torch.optim.Optimizer,
        exemptions: Exemptions,
        *,
        each_step: bool = False,
    ) -> None:
        self._model, self._parameters, self._optimizer = model, parameters, optimizer
        self._exemptions = exemptions
        self._peers: DataParallel | None = None
        self._board: Board | None = None
        self._has_begun = self._has_forward = False
        self._batch: torch.Tensor | None = None
        self._pending: list[tuple[int, dict[str, int], Readback]] = []
        self._own: dict[int, _Digests] = {}
        self._of_steps = WeightsOfSteps() if each_step else None
        self._equal = dict.fromkeys(_KINDS, 0)  # the last step at which they were
        self._same_batches = 0
        self._batches: set[int] = set()
        self._written: set[str] = set()  # kinds
        self._bypassed = False

    # -- digests ------------------------------------------------------------------------------------------------

    def forward(self, args: Any, kwargs: Any, *, is_checked: bool) -> None:
        """Look at the inputs of a forward; `is_checked` if the next step is one that is compared."""
        if not torch.is_grad_enabled() or not self._model.training:
            return
        self._has_forward = True
        if is_checked and self._batch is None and (self._board is not None or not self._has_begun):
            tensors = [tensor for tensor in _tensors((args, kwargs)) if tensor.layout is torch.strided][:_TENSORS]
            if tensors and not any(map(is_capturing, tensors)) and dist.is_available() and dist.is_initialized():
                device = tensors[0].device
                self._batch = torch.stack([digest(tensor).to(device) for tensor in tensors]).sum()

    def note_weights(self, step: int) -> None:
        """Note the weights before a step, if they are to be compared at each."""
        if self._of_steps is None:
            return
        if step == 1:
            self._begin()
        if self._peers is not None and _WEIGHTS not in self._written:
            self._of_steps.note(step, self._weights().values())

    def check(self, step: int) -> Iterator[Violation]:
        """Compute the digests before a step, and yield what settings show."""
        if not self._has_begun:
            self._has_begun = True
            self._begin()
            if dist.is_available() and dist.is_initialized():
                yield from summed_in_16_bits(self._model)
        batch, self._batch = self._batch, None
        peers = self._peers
        if peers is None or self._board is None or any(map(is_capturing, peers.replicas.values())):
            return
        self._bypassed = bool(peers.wrappers) and self._model in peers.wrappers and not self._has_forward
        parts = {
            _GRADIENTS: [_digest_of(param.grad) for param in self._stepped().values()],
            _WEIGHTS: [_digest_of(param) for param in self._weights().values()],
            _BATCHES: [] if batch is None or peers.may_share_batches else [batch],
        }
        digests = [each for part in parts.values() for each in part]
        if digests:
            device = next(self._model.parameters()).device
            lengths = {kind: len(part) for kind, part in parts.items()}
            self._pending.append((step, lengths, Readback(torch.stack([each.to(device) for each in digests]))))
            if self._of_steps is not None:
                self._of_steps.send()

    def after_step(self, step: int) -> Iterator[Violation]:
        """Take the digests that have reached the host, and yield what the ranks have found; waits for none."""
        self._has_forward = False
        if self._board is None:
            return
        while self._pending and (self._pending[0][2].is_on_host or step >= self._pending[0][0] + DELAY):
            of_step, lengths, readback = self._pending.pop(0)
            numbers = iter(readback.wait().tolist())
            self._own[of_step] = _Digests(
                {kind: [next(numbers) for _ in range(length)] for kind, length in lengths.items()}
            )
            self._own = dict([*self._own.items()][-_KEPT:])
            if self._of_steps is not None:
                self._of_steps.receive()
            if self._is_first:
                if self._of_steps is not None:  # first, because others read it after they have read the digests
                    self._board.write("steps", self._of_steps.written())
                self._board.write("digests", "\n".join(self._written_of(*each) for each in self._own.items()))
        if step % _READ_EVERY == 0 and self._own:
            yield from self._read(self._board)

    def repeated_epoch(self, step: int) -> Iterator[Violation]:
        """Yield that a sampler draws the order of an epoch again."""
        epoch = TORCH_CALLS.repeated_epoch()
        if epoch is not None:
            text = f"from step {step:,} on, the sampler draws the order of epoch {epoch} a second time."
            yield Violation("same-data-on-ranks", text, "Call sampler.set_epoch(epoch) at the start of each epoch.")

    def _begin(self) -> None:
        if self._board is not None:
            return
        self._peers = data_parallel(self._model, self._parameters())
        if self._peers is None:
            return
        shapes = [f"{name} {tuple(param.shape)}" for name, param in self._peers.replicas.items()]
        self._rank = dist.get_rank()
        self._is_first = self._rank == self._peers.ranks[0]
        self._board = Board.of_all_ranks(f"{self._peers.ranks} {type(self._model).__name__} {shapes}")

    def end(self) -> Iterator[Violation]:
        """Yield what the others have written since the last look, at the end of a run."""
        if self._board is not None:
            with suppress(RuntimeError, OSError):  # the store may have gone before
                yield from self._read(self._board)

    # -- comparisons --------------------------------------------------------------------------------------------

    def _written_of(self, step: int, digests: _Digests) -> str:
        return " ".join(map(str, [step, *(digests.total(kind) for kind in _KINDS)]))

    def _read(self, board: Board) -> Iterator[Violation]:
        if self._is_first:
            for kind in [kind for kind in _KINDS if kind not in self._written]:
                if text := board.read(kind):
                    self._written.add(kind)
                    yield from self._report(kind, _Broken.parsed(text), board.counted(f"count of {kind}"))
            return
        for line in board.read("digests").splitlines():
            step, *theirs = map(int, line.split())
            mine = self._own.pop(step, None)
            if mine is not None:
                self._compare(board, step, mine, dict(zip(_KINDS, theirs, strict=True)))

    def _compare(self, board: Board, step: int, mine: _Digests, theirs: Mapping[str, int]) -> None:
        for kind in _KINDS:
            total = mine.total(kind)
            if kind in self._written or _UNKNOWN in (total, theirs[kind]):
                continue
            is_equal = total == theirs[kind]
            if kind == _BATCHES:
                self._same_batches = self._same_batches + 1 if is_equal else 0
                self._batches.add(total)
                is_broken = self._same_batches == _SAME_BATCHES
            else:
                is_broken = not is_equal
                self._equal[kind] = step if is_equal else self._equal[kind]
            if is_broken:
                # Weights differ because gradients do.
                self._written.update([kind, _WEIGHTS] if kind == _GRADIENTS else [kind])
                if board.count(f"count of {kind}") == 1:
                    board.write(kind, str(self._broken(board, kind, step, mine)))

    def _broken(self, board: Board, kind: str, step: int, mine: _Digests) -> _Broken:
        numbers, weights = [len(self._batches)] if kind == _BATCHES else mine.of[kind], Differ()
        if kind != _BATCHES and self._of_steps is not None:
            weights = self._of_steps.differ(board.read("steps"), self._equal[_WEIGHTS], step)
            if kind == _WEIGHTS and weights.apart:
                numbers = self._of_steps.before(weights.apart)
        return _Broken(self._rank, step, self._equal[kind], int(self._bypassed), weights, numbers)

    def _report(self, kind: str, broken: _Broken, count: int) -> Iterator[Violation]:
        assert self._peers is not None
        step = broken.step
        ranks = f"ranks {self._peers.ranks[0]} and {broken.rank}" + (f", and {count - 1} more" if count > 1 else "")
        if kind == _BATCHES:
            text = f"{ranks} trained on the same batch at {_SAME_BATCHES} checks in a row, the last at step {step:,}."
            remedy = "Use a DistributedSampler, or seed what draws batches with the rank."
            yield Violation("same-data-on-ranks", text, remedy, "warning" if broken.numbers[0] > 1 else "note")
            return
        own, named = self._own.get(step), self._weights() if kind == _WEIGHTS else self._stepped()
        mine, since, weights = () if own is None else own.of[kind], broken.since, ""
        if broken.weights.apart and kind == _WEIGHTS:
            since, step = broken.weights
            mine = () if self._of_steps is None else self._of_steps.before(step)
        elif broken.weights.apart:
            weights = f"; the weights were {_when(*broken.weights)}"
        names = tuple(name for name, one, other in zip(named, mine, broken.numbers, strict=False) if one != other)
        what, plural, are = names[0] if names else "a parameter", "", "is"
        if len(names) > 1:
            what, plural, are = f"{what} and {several(len(names) - 1, 'more parameter')}", "s", "are"
        if kind == _WEIGHTS:
            text = f"{what} {are} not the same on {ranks}: {_when(since, step)}."
            remedy = "Look for code that changes weights, or steps, on some ranks only."
            yield Violation("replicas-differ", text, _BYPASSED if broken.bypassed else remedy, parameters=names)
        else:
            what = f"the gradient{plural} of {what}"
            text = f"{what} {are} not the same before the step on {ranks}: {_when(since, step)}{weights}."
            remedy = "Look for no_sync() around the last micro-batch, or a hook that does not reduce."
            yield Violation("gradients-not-reduced", text, _BYPASSED if broken.bypassed else remedy, parameters=names)

    def _stepped(self) -> dict[str, torch.Tensor]:
        assert self._peers is not None
        own = set(map(id, params_of(self._optimizer)))
        found = {name: param for name, param in self._peers.reduced.items() if id(param) in own}
        return self._without_exempt("gradients-not-reduced", found)

    def _weights(self) -> dict[str, torch.Tensor]:
        assert self._peers is not None
        return self._without_exempt("replicas-differ", self._peers.replicas)

    def _without_exempt(self, invariant: str, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: param for name, param in found.items() if not self._exemptions.has(invariant, name)}


_BYPASSED = (
    "The forward of DistributedDataParallel was not called before that step: call it, and not the model inside it."
)


def _when(equal: int, apart: int) -> str:
    return f"equal at step {equal:,}, different at step {apart:,}" if equal else f"different at step {apart:,}"


def _digest_of(tensor: Any) -> torch.Tensor:
    """Return the digest of this rank's part of a tensor; that of no gradient is the same on all ranks."""
    if tensor is None or tensor.is_meta or tensor.layout is not torch.strided:
        return torch.zeros((), dtype=torch.int64)
    return digest(tensor.to_local() if hasattr(tensor, "to_local") else tensor)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, tuples and mappings. Iterators are not touched, because that would use them up."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
