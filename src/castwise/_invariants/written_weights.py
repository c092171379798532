"""`written-weights`: between two steps of an optimizer, nothing else writes its weights."""

from __future__ import annotations

import ctypes
import operator
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch

from castwise._digests import digest
from castwise._guard import ErrorBoundary, guarded
from castwise._invariants.invariant import Exemptions, Violation, named
from castwise.amp._devices import free_bytes, is_capturing
from castwise.amp._gradients import params_of
from castwise.amp._readback import DELAY, Readback

_SMALL = 1 << 16  # elements: of such weights, a copy takes little memory, and less time than a digest
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EVERY = 8  # by default, weights are compared before one step in so many
_HABIT = 3  # steps before which a script writes weights that do so by intent
_APART = 50  # steps after another write until one bit is a flip, and not the rounding of code that writes weights
_SAME_FACTOR = 0.01  # of which factors may differ from one that most values were multiplied by
_ROUNDED = 2  # bits at the end that code may change which adds a number and takes it off again
_kind_of = operator.attrgetter("dtype", "shape", "device")
_WATCHES: WeakSet[WrittenWeights] = WeakSet()


@contextmanager
def expected_writes() -> Iterator[None]:
    """Report nothing of what is written in the block; see `castwise.monitor.expected_writes`."""
    watches = list(_WATCHES)
    for watch in watches:
        watch.look()  # for writes before the block, which it must not hide
    try:
        yield
    finally:
        for watch in watches:
            watch.take_again()


@dataclass(frozen=True)
class Written:
    """A weight that was written outside its optimizer.

    Args:
        step: The number of the step before which it was.
        name: The parameter.
        elements: How many elements differ; None if that is not known.
        of: The number of all elements.
        ratio: New over old values; None if it is not known, or they are not all multiplied by one number.
        norms: The norms of all its values before and after; None if they are not known.
        flipped: The element and the bit, if a single bit differs.
        values: That element before and after.
    """

    step: int
    name: str
    elements: int | None = None
    of: int = 0
    ratio: float | None = None
    norms: tuple[float, float] | None = None
    flipped: tuple[int, int] | None = None
    values: tuple[float, float] | None = None

    def __str__(self) -> str:
        if self.flipped is not None and self.values is not None:
            (element, bit), (old, new) = self.flipped, self.values
            return (
                f"bit {bit} of element {element:,} of {self.name} was flipped between steps {self.step - 1:,} and "
                f"{self.step:,}: {old:.6g} became {new:.6g}"
            )
        how = "" if self.elements is None else f" in {self.elements:,} of {self.of:,} elements"
        change = "" if self.norms is None else "; its norm was {:.4g}, and became {:.4g}".format(*self.norms)
        change = change if self.ratio is None else f", by a factor of {self.ratio:.4g}"
        where = f"between steps {self.step - 1:,} and {self.step:,}"
        return f"{self.name} was written outside the optimizer {where}{how}{change}"

    @property
    def sentence(self) -> str:
        """The same as a sentence, in which the name of the parameter keeps its first letter."""
        return f"{self}." if self.flipped is None else f"B{str(self)[1:]}."


class _Group:
    """Weights of one dtype that are compared together.

    Args:
        params: The weights by name.
        is_copied: Whether their values are kept, and not only digests.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], *, is_copied: bool) -> None:
        self.params, self._is_copied = params, is_copied
        self._kinds = [*map(_kind_of, params.values())]
        self._before: list[torch.Tensor] = []

    def take(self) -> bool:
        """Keep what the weights are now; return False if they are others."""
        params = self.params.values()
        if [*map(_kind_of, params)] != self._kinds or any(map(_is_freed, params)):
            return False
        values = [*map(_local, params)]
        if not self._is_copied:
            self._before = [digest(value) for value in values]
        elif self._before:
            torch._foreach_copy_(self._before, values)
        else:
            self._before = [value.clone(memory_format=torch.contiguous_format) for value in values]
        return True

    def differing(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """Yield the names of weights that are not what was kept, with what they are, and what they were if known."""
        for (name, param), kind, before in zip(self.params.items(), self._kinds, self._before, strict=False):
            if _is_freed(param) or _kind_of(param) != kind:
                continue
            now = _local(param)
            if not self._is_copied:
                if digest(now) != before:
                    yield name, now, None
            elif not _same_bits(now, before):
                yield name, now, before


class _GroupInMemory:
    """Contiguous weights in the host's memory, of which all bytes are kept.

    Bytes are compared 1.5 times as fast as by `torch.equal`, and those of all weights by one operation.

    Args:
        params: The weights by name.
    """

    def __init__(self, params: Mapping[str, torch.Tensor]) -> None:
        self.params = params
        self._params = list(params.values())
        self._kinds = [*map(_kind_of, self._params)]
        self._before: list[bytearray] = []
        self._addresses: list[int] = []
        self._values: list[torch.Tensor] = []  # the weights at these addresses, whose memory is not freed meanwhile
        self._bytes: list[memoryview] = []  # the same memory
        self._copies: list[memoryview] = []  # that of `_before`

    def take(self) -> bool:
        """Keep what the weights are now; return False if they are others, or not in the host's memory."""
        if not self._find():
            return False
        if not self._before:
            self._before = [bytearray(len(each)) for each in self._bytes]
            self._copies = [memoryview(each) for each in self._before]
        for copy, now in zip(self._copies, self._bytes, strict=True):
            copy[:] = now
        return True

    def differing(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """Yield the names of weights that are not what was kept, with what they are, and what they were."""
        if not self._before or not self._find() or self._before == self._bytes:
            return
        for name, value, before, now in zip(self.params, self._values, self._before, self._bytes, strict=True):
            if before != now:
                yield name, value, torch.frombuffer(before, dtype=value.dtype).view_as(value)

    def _find(self) -> bool:
        """Find the memory of the weights; return False if they are others now, or not in the host's."""
        addresses = [*map(torch.Tensor.data_ptr, self._params)]
        if addresses != self._addresses:  # at first, or `.data` was set
            values = [param.detach() for param in self._params]
            if [*map(_kind_of, values)] != self._kinds or not all(map(_is_in_memory, values)):
                return False
            self._addresses, self._values, self._bytes = addresses, values, [*map(_bytes_of, values)]
        return True


class _GroupOnDevice:
    """Weights of one dtype on an accelerator, joined in one tensor, so that to compare them takes few launches.

    The host learns two steps later how many elements differ, and the first and the last of them.

    Args:
        params: The weights by name.
    """

    def __init__(self, params: Mapping[str, torch.Tensor]) -> None:
        self.params = params
        self._kinds = [*map(_kind_of, params.values())]
        self._ends = [*accumulate(param.numel() for param in map(_local, params.values()))]
        self._before: torch.Tensor | None = None
        self._pending: deque[tuple[int, Readback]] = deque()

    def take(self) -> bool:
        """Keep what the weights are now; return False if they are others."""
        if [*map(_kind_of, self.params.values())] != self._kinds:
            return False
        flat = self._flat()
        if flat is None:  # the copies would become part of a CUDA graph
            self._before = None
        else:
            self._before = torch.cat(flat) if self._before is None else torch.cat(flat, out=self._before)
        return True

    def compare(self, step: int) -> None:
        """Start to compare the weights with what was kept, before a step."""
        flat, before = self._flat(), self._before
        if flat is None or before is None:
            return
        pair = _bits(torch.cat(flat)), _bits(before)
        differ = (pair[0] != pair[1]).to(torch.uint8)
        at = torch.stack([differ.argmax(), len(differ) - 1 - differ.flip(0).argmax()])
        numbers = [differ.sum(dtype=torch.int64).view(1), at, *(bits.index_select(0, at).long() for bits in pair)]
        self._pending.append((step, Readback(torch.cat(numbers))))

    def written(self, *, but: int) -> Iterator[Written]:
        """Yield what comparisons have found, except the last `but`: of several weights, the first and the last."""
        while len(self._pending) > but:
            step, readback = self._pending.popleft()
            count, first, last, new, _, old, _ = readback.wait().tolist()
            owners = sorted({bisect_right(self._ends, at) for at in (first, last)}) if count else []
            for owner in owners:
                name, param = list(self.params.items())[owner]
                element = first - (self._ends[owner - 1] if owner else 0)
                values = [torch.tensor(bits, dtype=_BITS[param.itemsize]).view(param.dtype) for bits in (new, old)]
                one = _written(step, name, *(value.view(1) for value in values))
                if count > 1:
                    yield Written(step, name, *((count, param.numel()) if len(owners) == 1 else ()))
                else:
                    yield replace(one, of=param.numel(), flipped=one.flipped and (element, one.flipped[1]))

    def _flat(self) -> list[torch.Tensor] | None:
        values = [_local(param) for param in self.params.values()]
        return None if any(map(is_capturing, values)) else [value.view(-1) for value in values]


class WrittenWeights:
    """Compares the weights of optimizers before steps with what they were after the one before.

    On accelerators only where copies are kept, for which there has to be memory, and without waiting for the device.

    Args:
        parameters: Returns the model's parameters by name.
        exemptions: What is not compared.
        number: Returns the number of the next step.
        copies: Whether to compare before each step and not only before every eighth, and to keep a copy of all weights,
            which tells the element and the bit, and not only of small ones.
    """

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        exemptions: Exemptions,
        number: Callable[[], int],
        *,
        copies: bool,
    ) -> None:
        self._parameters, self._exemptions, self._number, self._copies = parameters, exemptions, number, copies
        self._groups: dict[torch.optim.Optimizer, list[_AnyGroup]] = {}
        self._guard = ErrorBoundary("castwise may report weights as written that a script writes on purpose")
        self._ids: dict[torch.optim.Optimizer, list[int]] = {}
        self._steps: Counter[torch.optim.Optimizer] = Counter()
        self._writes = 0  # steps before which weights were written
        self._last_write: dict[torch.optim.Optimizer, int] = {}
        self._found: list[Written] = []
        if not exemptions.has("written-weights"):
            _WATCHES.add(self)

    def before_step(self, optimizer: torch.optim.Optimizer) -> list[Written]:
        """Return what was written since the optimizer's last step."""
        found = [*self._found, *self._differing(optimizer)]
        self._found = []
        if found:
            self._writes += 1
            step, last = self._steps[optimizer], self._last_write.get(optimizer, -_APART)
            self._last_write[optimizer] = step
            if len(found) > 1 or step - last < _APART:
                return [replace(each, flipped=None, values=None) for each in found]
        return found

    def sees_all(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if all weights of an optimizer are compared before each step."""
        groups = self._groups.get(optimizer, ())
        return self._copies and sum(len(group.params) for group in groups) == len(self._ids.get(optimizer, [None]))

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep the weights that a step has left, if they are compared before the next one."""
        self._steps[optimizer] += 1
        if self._writes > _HABIT or self._exemptions.has("written-weights"):
            self.stop()
            return
        if not self._is_compared(optimizer):
            return
        params = params_of(optimizer)
        ids = [*map(id, params)]
        if self._ids.get(optimizer) != ids:  # at the first step, or the model was changed
            self._ids[optimizer], self._groups[optimizer] = ids, self._grouped(params)
        if not all(group.take() for group in self._groups[optimizer]):
            self._groups[optimizer] = self._grouped(params)
            for group in self._groups[optimizer]:
                group.take()

    @guarded
    def look(self) -> None:
        """Look for writes before some that are expected; the next step reports them."""
        self._found += [written for optimizer in self._groups for written in self._differing(optimizer)]

    def _is_compared(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the weights are compared before the next step."""
        return self._copies or (self._steps[optimizer] + 1) % _EVERY == 0

    @guarded
    def take_again(self) -> None:
        """Keep the weights as they are."""
        for groups in self._groups.values():
            for group in groups:
                group.take()

    def end(self) -> list[Written]:
        """Return what comparisons on accelerators have found since, which waits for them."""
        groups = [group for groups in self._groups.values() for group in groups if isinstance(group, _GroupOnDevice)]
        return [written for group in groups for written in group.written(but=0)]

    def stop(self) -> None:
        """Drop all copies."""
        self._groups.clear()
        self._ids.clear()
        _WATCHES.discard(self)

    def _grouped(self, params: Sequence[torch.Tensor]) -> list[_AnyGroup]:
        names = {id(param): name for name, param in self._parameters().items()}
        in_memory: dict[str, torch.Tensor] = {}
        copied: dict[torch.dtype, dict[str, torch.Tensor]] = {}
        digested: dict[str, torch.Tensor] = {}
        on_device: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
        for number, param in enumerate(params):
            name = names.get(id(param), f"parameter {number}")
            if not _can_compare(param) or self._exemptions.has("written-weights", name):
                continue
            if param.device.type != "cpu":
                if self._copies:
                    on_device.setdefault((param.device, param.dtype), {})[name] = param
            else:
                if param.numel() > _SMALL and not self._copies:
                    digested[name] = param
                elif _is_in_memory(param.detach()):
                    in_memory[name] = param
                else:
                    copied.setdefault(param.dtype, {})[name] = param
        groups: list[_AnyGroup] = [_GroupInMemory(in_memory)] if in_memory else []
        groups += [_GroupOnDevice(group) for group in on_device.values() if _has_memory_for(group.values())]
        groups += [_Group(group, is_copied=True) for group in copied.values()]
        return [*groups, _Group(digested, is_copied=False)] if digested else groups

    def _differing(self, optimizer: torch.optim.Optimizer) -> Iterator[Written]:
        for group in self._groups.get(optimizer, ()) if self._is_compared(optimizer) else ():
            if isinstance(group, _GroupOnDevice):
                group.compare(self._number())
                yield from group.written(but=DELAY)
                continue
            for name, now, before in group.differing():
                yield _written(self._number(), name, now, before)


def report_of(written: Sequence[Written], *, copies: bool) -> Iterator[Violation]:
    """Yield what is reported of weights that were written before a step."""
    for each in [each for each in written if each.flipped is not None]:
        remedy = "A fault of the memory does that: if it comes back, test this machine's."
        yield Violation("written-weights", f"{each}.", remedy, parameters=(each.name,))
    others = [each for each in written if each.flipped is None]
    if others:
        names = tuple(each.name for each in others)
        more = f" So were {named(names[1:])}." if len(names) > 1 else ""
        unknown = "" if copies or others[0].elements is not None else " With --spikes, castwise tells which elements."
        remedy = "If it is intended, put it into castwise.monitor.expected_writes()."
        yield Violation("written-weights", f"{others[0]}.{more}{unknown}", remedy, "note", names)


def _written(step: int, name: str, now: torch.Tensor, before: torch.Tensor | None) -> Written:
    if before is None:
        return Written(step, name)
    new, old = now.reshape(-1), before.reshape(-1)
    at = (_bits(new) != _bits(old)).nonzero().view(-1)
    first = int(at[0])
    changed = int(_bits(new)[first]) ^ int(_bits(old)[first])
    values = float(old[first]), float(new[first])
    bits = changed & (1 << 8 * now.itemsize) - 1
    if len(at) == 1 and bits.bit_count() == 1 and bits >> _ROUNDED:
        bit = bits.bit_length() - 1
        return Written(step, name, 1, now.numel(), flipped=(first, bit), values=values)
    ratios = new[at].double() / old[at].double()
    ratio = float(ratios.median())
    is_factor = float(((ratios - ratio).abs() <= _SAME_FACTOR * abs(ratio)).double().mean()) > 0.5
    norms = float(old.double().norm()), float(new.double().norm())
    return Written(step, name, len(at), now.numel(), ratio if is_factor else None, norms)


def _same_bits(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Return True if two contiguous tensors of one shape and dtype have the same bits."""
    pair = now.view(-1), before.view(-1)
    if all(each.nbytes % 8 == each.storage_offset() * each.itemsize % 8 == 0 for each in pair):
        pair = pair[0].view(torch.int64), pair[1].view(torch.int64)  # which torch compares twice as fast
        return torch.equal(*pair)
    return torch.equal(*map(_bits, pair))


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Return the memory of values that `_is_in_memory`."""
    return memoryview((ctypes.c_char * values.nbytes).from_address(values.data_ptr())).cast("B")


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(_BITS[values.itemsize])


def _local(param: Any) -> torch.Tensor:
    local = param.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    return local.contiguous()  # type: ignore[no-any-return]  # a tensor


def _can_compare(param: torch.Tensor) -> bool:
    is_known = param.is_floating_point() and param.layout is torch.strided and not param.is_meta
    return is_known and param.numel() > 0 and not _is_freed(param)


def _is_freed(param: torch.Tensor) -> bool:
    """Return True if the memory of a weight was freed, as that of weights which are only gathered for a while."""
    return type(param.detach()) is torch.Tensor and not param.data_ptr()


def _is_in_memory(values: torch.Tensor) -> bool:
    """Return True if values are in the host's memory, one after the other."""
    is_plain = type(values) is torch.Tensor and values.layout is torch.strided
    return is_plain and values.device.type == "cpu" and values.is_contiguous() and bool(values.data_ptr())


def _has_memory_for(params: Iterable[torch.Tensor]) -> bool:
    """Return True if two copies of tensors take at most a quarter of the memory that is free on their accelerator."""
    values = [_local(param) for param in params]
    free = free_bytes(values[0].device.type)
    return free is None or 2 * sum(value.nbytes for value in values) <= free / 4


_AnyGroup = _Group | _GroupInMemory | _GroupOnDevice
