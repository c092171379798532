"""Ops by name: which ops two versions of a program run, where, in which dtypes and with which arguments.

They name what has changed and judge nothing: a rewrite that computes the same runs other ops, too.
"""

from __future__ import annotations

import bisect
import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from castwise._mistakes.mistake import caller
from castwise._number_text import several
from castwise._shown import Block, Shown
from castwise._torch_private import (
    TorchDispatchMode,
    graph_node_running,
    graph_nodes_made,
    is_backward_running,
    schema_of,
    tree_leaves,
    without_dispatch_modes,
)
from castwise.checking._names import Names
from castwise.checking._sketches import digest_of
from castwise.tracing._op_by_op import call_op

LINES, _CHANGES = 20, 4
"""Differences that are printed, and changes of each."""
_WINDOW = 500  # ops that are aligned at once, in quadratic time
# Ops that compute no values, besides views. Names begin with one of these after "aten." and underscores.
_SKIPPED = (
    *("detach", "alias", "unsafe_view", "reshape_alias", "lift_fresh", "empty", "new_empty", "local_scalar"),
    "set_",  # which puts memory from workers of a data loader into tensors, whenever it comes
)


class Where(NamedTuple):
    """Where an op runs.

    Args:
        module: The innermost running module, "" for the model itself; None for no module.
        place: File and line of the program.
    """

    module: str | None
    place: str


class OpCall(NamedTuple):
    """One call of an op.

    Args:
        name: The op, such as "mm".
        shapes: Shapes of its results.
        inputs: Floating-point dtypes that it read, each once.
        results: Those that it returned.
        settings: Names and values of its other arguments.
        phase: "forward", "backward" or "optimizer".
        where: In a backward, where the forward made its node.
        digest: Hash of the results.
    """

    name: str
    shapes: str
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    phase: str
    where: Where
    digest: str

    @property
    def dtypes(self) -> str:
        """Dtypes as text."""
        results = ", ".join(self.results)
        return f"{', '.join(self.inputs)} -> {results}" if self.inputs and self.inputs != self.results else results

    def __str__(self) -> str:
        return f"{self.name} {self.dtypes}".rstrip()


class OpLog(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes each op of a program that computes something, in `calls`.

    Args:
        names: Names of the program's modules.
    """

    def __init__(self, names: Names) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.calls: list[OpCall] = []
        self._names = names
        self._running: list[str] = []
        self._optimizers = 0
        self._nodes: tuple[list[int], list[Where]] = [], []  # first autograd node of each op that made some
        self._made = graph_nodes_made()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the ops that run in the block."""
        handles = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
            optimizer_hooks.register_optimizer_step_pre_hook(lambda *_: self._stepping(1)),
            optimizer_hooks.register_optimizer_step_post_hook(lambda *_: self._stepping(-1)),
        ]
        with ExitStack() as undo:
            for handle in handles:
                undo.callback(handle.remove)
            undo.enter_context(self)
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        with without_dispatch_modes():
            self._running.append(self._names.module(module))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._running:
            self._running.pop()

    def _stepping(self, by: int) -> None:
        self._optimizers += by

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        kwargs = kwargs or {}
        phase, where = self._place()
        inputs = _dtypes([args, kwargs])
        result = call_op(func, args, kwargs)
        library, _, name = str(getattr(func, "overloadpacket", func)).partition(".")
        tensors = _tensors(result) or _tensors(args)  # such as those that a foreach op has written
        tensors = [tensor for tensor in tensors if not tensor.is_meta]
        is_skipped = "c10d" in library or name.lstrip("_").startswith(_SKIPPED)  # a collective may still be running
        if tensors and not is_skipped and not getattr(func, "is_view", False):
            shapes = ", ".join(dict.fromkeys(str(tuple(tensor.shape)) for tensor in tensors))
            settings = _settings(func, args, kwargs)
            self.calls.append(
                OpCall(name, shapes, inputs, _dtypes(tensors), settings, phase, where, digest_of(tensors))
            )
        return result

    def _place(self) -> tuple[str, Where]:
        """Return phase and place of the op that is about to run, and note the nodes that it has made."""
        if is_backward_running() and not self._running:
            node = graph_node_running()
            position = -1 if node is None or node >= self._made else bisect.bisect_right(self._nodes[0], node) - 1
            return "backward", self._nodes[1][position] if position >= 0 else Where(None, "")
        line = caller()
        place = "" if line is None else f"{_relative(line.file)}:{line.line}"
        where = Where(self._running[-1] if self._running else None, place)
        if (made := graph_nodes_made()) > self._made:
            self._nodes[0].append(self._made)
            self._nodes[1].append(where)
            self._made = made
        return "optimizer" if self._optimizers else "forward", where


def _tensors(value: Any) -> list[torch.Tensor]:
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]  # of a DTensor


def _dtypes(value: Any) -> tuple[str, ...]:
    dtypes = (tensor.dtype for tensor in _tensors(value) if tensor.is_floating_point())
    return tuple(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _settings(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    schema = schema_of(func)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    kinds = (bool, int, float, complex, str)
    given = [*zip(names, args, strict=False), *kwargs.items()]
    settings = ((name, [each for each in tree_leaves(value) if isinstance(each, kinds)]) for name, value in given)
    return tuple((name, ", ".join(map(str, values))) for name, values in settings if values)


def _relative(file: str) -> str:
    inside = os.path.relpath(file) if os.path.isabs(file) else file
    return file if inside.startswith("..") else inside


@dataclass(frozen=True)
class OpDifference:
    """Ops of one line that are not the same in two versions of a program.

    Args:
        phase: "forward", "backward" or "optimizer". Ops outside modules count as forward if no backward runs them.
        modules: The modules in which they run, "" for the model; empty for none.
        place: File and line in the new version, or in the old one if the ops are gone; "" if it is not known. Of a
            backward, it is the line of the forward.
        changes: What has changed.
        rounds_more: Whether results have fewer bits than before.
    """

    phase: str
    modules: tuple[str, ...]
    place: str
    changes: tuple[str, ...]
    rounds_more: bool

    def __str__(self) -> str:
        changes = [*self.changes[:_CHANGES], *(["..."] if len(self.changes) > _CHANGES else [])]
        note = "; rounds to fewer bits" if self.rounds_more else ""
        return f"{_where(self.phase, self.modules, self.place)}: {'; '.join(changes)}{note}"


@dataclass(frozen=True, repr=False)
class OpDifferences(Shown):
    """What `compare_ops` returns; prints as a line for each difference.

    Args:
        before: Ops that the old version ran.
        now: Ops that the new version ran.
        differences: What differs, in the order of the new version.
        first_result: The first op that is the same and returned other bits; None if all returned the same.
    """

    before: int
    now: int
    differences: tuple[OpDifference, ...]
    first_result: str | None

    def __repr__(self) -> str:
        return f"OpDifferences({self.lines()[0]})"

    def _blocks(self) -> Iterator[Block]:
        yield "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return a summary and a line for each difference, at most 20."""
        found = self.differences
        lines = [f"{several(self.before, 'op')} before, {self.now:,} now: {several(len(found), 'difference')}"]
        lines += [f"  {difference}" for difference in found[:LINES]]
        if len(found) > LINES:
            lines.append(f"  ... and {len(found) - LINES} more")
        others = f"first with other results: {self.first_result}" if self.first_result else "all have the same results"
        return [*lines, f"  of the ops that both run, {others}"]

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return asdict(self)


@dataclass
class _Changes:
    """What differs in one line of one module, by the index of its first op in the new version, or in the old one."""

    index: int
    gone: list[OpCall] = field(default_factory=list)
    come: list[OpCall] = field(default_factory=list)
    texts: dict[str, None] = field(default_factory=dict)


def differences(before: Sequence[OpCall], now: Sequence[OpCall]) -> OpDifferences:
    """Return how the ops of two runs differ. Those of each module and phase are compared by themselves."""
    olds, news = _by_module(before), _by_module(now)
    others: list[int] = []
    lines: dict[tuple[str, str | None, str], _Changes] = {}
    for phase, module in dict.fromkeys([*news, *olds]):
        old, new = olds.get((phase, module), []), news.get((phase, module), [])
        for same, a, b in _changed([call for _, call in old], [call for _, call in new]):
            if same:
                others += [new[j][0] for i, j in zip(a, b, strict=True) if old[i][1].digest != new[j][1].digest]
                continue
            gone, come = [old[i][1] for i in a], [new[j][1] for j in b]
            index = new[b.start][0] if b else old[a.start][0]  # before the first difference, both are the same
            line = lines.setdefault((phase, module, (come or gone)[0].where.place), _Changes(index))
            line.gone += gone
            line.come += come
            line.texts[_described(gone, come)] = None
    grouped: dict[OpDifference, list[str]] = {}
    for (phase, module, place), line in sorted(lines.items(), key=lambda item: (item[1].index, bool(item[1].come))):
        alike = OpDifference(phase, (), place, tuple(line.texts), _rounds_more(line.gone, line.come))
        grouped.setdefault(alike, []).extend([] if module is None else [module])
    found = tuple(replace(alike, modules=tuple(modules)) for alike, modules in grouped.items())
    first = now[min(others)] if others else None
    return OpDifferences(len(before), len(now), found, None if first is None else _first_result(first))


def _by_module(calls: Iterable[OpCall]) -> dict[tuple[str, str | None], list[tuple[int, OpCall]]]:
    places: dict[tuple[str, str | None], list[tuple[int, OpCall]]] = {}
    for index, call in enumerate(calls):
        places.setdefault((call.phase, call.where.module), []).append((index, call))
    return places


def _changed(old: list[OpCall], new: list[OpCall]) -> Iterator[tuple[bool, range, range]]:
    """Yield positions of calls that are the same or not; those of which only dtypes or arguments differ one by one."""
    for same, a, b in _aligned([call[:5] for call in old], [call[:5] for call in new]):
        if same:
            yield True, a, b
            continue
        for alike, c, d in _aligned([old[i][:2] for i in a], [new[j][:2] for j in b]):
            c, d = a[c.start : c.stop], b[d.start : d.stop]
            pairs = zip(c, d, strict=True) if alike else ()
            yield from ((False, range(i, i + 1), range(j, j + 1)) for i, j in pairs)
            if not alike:
                yield False, c, d


def _aligned(old: list[Any], new: list[Any]) -> Iterator[tuple[bool, range, range]]:
    """Yield ranges of two lists that are equal, or that are not."""
    start = end = 0  # most is the same at the beginning and the end
    shorter = min(len(old), len(new))
    while start < shorter and old[start] == new[start]:
        start += 1
    while end < shorter - start and old[-1 - end] == new[-1 - end]:
        end += 1
    yield True, range(start), range(start)
    i = j = start
    while i < len(old) - end or j < len(new) - end:
        before, now = (values[at : min(at + _WINDOW, len(values) - end)] for values, at in ((old, i), (new, j)))
        codes = difflib.SequenceMatcher(None, before, now, autojunk=False).get_opcodes()
        last, a, b, c, d = codes[-1]
        goes_on = max(len(old) - i, len(new) - j) - end > _WINDOW
        if goes_on and len(codes) > 1 and last != "equal" and max(b - a, d - c) < _WINDOW // 2:
            codes.pop()  # what has no equal in this window may have one in the next, which begins with it
        for tag, a, b, c, d in codes:
            yield tag == "equal", range(a + i, b + i), range(c + j, d + j)
        i, j = i + codes[-1][2], j + codes[-1][4]
    yield True, range(len(old) - end, len(old)), range(len(new) - end, len(new))


def _described(gone: list[OpCall], come: list[OpCall]) -> str:
    if len(gone) == len(come) == 1 and gone[0][:2] == come[0][:2]:
        old, new = gone[0], come[0]
        if old.results == new.results and old.inputs != new.inputs:
            read = [", ".join(each.inputs) or "no floating-point numbers" for each in (old, new)]
            return f"{old.name} reads {read[1]} instead of {read[0]}"
        if old.dtypes != new.dtypes:
            return f"{old} is now {new.dtypes}"
        before, now = dict(old.settings), dict(new.settings)
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        changes = (f"{name} {before.get(name, 'not set')} is now {now.get(name, 'not set')}" for name in names)
        return f"{old.name}, {', '.join(changes)}"
    if not gone or not come:
        return f"new: {_listed(come)}" if come else f"gone: {_listed(gone)}"
    if list(map(str, gone)) == list(map(str, come)):
        return f"{gone[0].name} of {gone[0].shapes} is now of {come[0].shapes}"
    return f"{_listed(gone)} replaced by {_listed(come)}"


def _listed(calls: list[OpCall]) -> str:
    runs = [(text, len(list(run))) for text, run in groupby(map(str, calls))]
    more = [f"... {len(runs) - _CHANGES} more"] if len(runs) > _CHANGES else []
    return ", ".join([f"{count} x {text}" if count > 1 else text for text, count in runs[:_CHANGES]] + more)


def _rounds_more(gone: list[OpCall], come: list[OpCall]) -> bool:
    """Return True if results are coarser than before, or more of them are coarser than what was read."""
    (old, old_casts), (new, new_casts) = (
        (
            max((_eps(call.results) for call in calls), default=0.0),
            sum(_eps(call.results) > _eps(call.inputs) > 0 for call in calls),
        )
        for calls in (gone, come)
    )
    return new > old > 0 or new_casts > old_casts


def _eps(dtypes: Iterable[str]) -> float:
    return max((torch.finfo(getattr(torch, dtype)).eps for dtype in dtypes), default=0.0)


def _first_result(call: OpCall) -> str:
    modules = () if call.where.module is None else (call.where.module,)
    return f"{_where(call.phase, modules, call.where.place)}: {call}"


def _where(phase: str, modules: Sequence[str], place: str) -> str:
    names = [name or "the model" for name in modules] or (["outside modules"] if phase != "optimizer" else [])
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{''.join(names[:1])}{more}{', ' if names else ''}{phase}{f' ({place})' if place else ''}"
