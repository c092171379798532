"""Random nestings of regions, run with torch's autocast and ours: after every action the same state, bits and refusals.

Torch itself forgets what to put back when one object is entered again while it is active, in the same thread or in
another. There, and only there, the reference enters a copy of its object.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import castwise

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = ("cpu", "cuda")
GRAD_MODES = {"grad": torch.enable_grad, "no grad": torch.no_grad, "inference": torch.inference_mode}


class Boom(Exception):  # noqa: N818
    """What a program raises."""


@pytest.fixture(autouse=True, scope="module")
def no_pool_of_threads_per_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def state() -> tuple[Any, ...]:
    """All of this thread's autocast state."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    switches = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in DEVICES]
    return (*switches, torch.is_autocast_cache_enabled(), nesting)


def put_back(before: tuple[Any, ...]) -> None:
    """Undo by hand what a wrong region left behind."""
    for device, (enabled, dtype) in zip(DEVICES, before, strict=False):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(before[-2])
    while state()[-1] > before[-1]:
        torch.autocast_decrement_nesting()
    while state()[-1] < before[-1]:
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


def bits(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return tensor.dtype, tuple(tensor.shape), tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


class Machine:
    """Runs a program with one library's regions and logs all that can be seen after each action."""

    def __init__(self, autocast: Any, copy_active: bool, caught: list[warnings.WarningMessage]) -> None:
        self.autocast, self.copy_active, self.caught = autocast, copy_active, caught
        self.log: list[Any] = []
        self.made: list[Any] = []
        self.active: list[Any] = []
        self.losses: list[torch.Tensor] = []
        draw = torch.Generator().manual_seed(0)
        self.x, *weights = (torch.randn(3, 3, generator=draw) for _ in range(3))
        self.weights = [torch.nn.Parameter(weight) for weight in weights]
        self.hidden = self.x

    def run(self, actions: list[Any]) -> None:
        for name, *arguments in actions:
            getattr(self, name)(*arguments)
            self.note(name)

    def note(self, *what: Any) -> None:
        warned = collections.Counter(message.category for message in self.caught)
        self.log.append((*what, state(), torch.is_grad_enabled(), warned))

    # -- actions --

    def op(self, name: str) -> None:
        first, second = self.weights
        try:
            if name == "linear":
                self.hidden = torch.nn.functional.linear(self.hidden, first)
            elif name == "matmul":
                self.hidden = self.x @ second
            elif name == "softmax":
                self.hidden = self.hidden.softmax(-1)
            elif name == "layer_norm":
                self.hidden = torch.nn.functional.layer_norm(self.hidden, (3,), second[0], first[0])
            else:
                self.hidden = self.hidden + self.x
        except RuntimeError as refusal:
            self.log.append((type(refusal), str(refusal)))
            return
        self.log.append(bits(self.hidden))
        if self.hidden.requires_grad:
            self.losses.append(self.hidden.float().sin().sum())

    def change_weights(self) -> None:
        for weight in self.weights:
            weight.data.add_(0.25)

    def backward(self) -> None:
        losses, self.losses = self.losses, []
        self.hidden = self.hidden.detach()
        try:
            if losses and not torch.is_inference_mode_enabled():
                torch.stack(losses).sum().backward()
        except RuntimeError as refusal:
            self.log.append((type(refusal), str(refusal)))
        self.log.append([bits(weight.grad) for weight in self.weights])
        for weight in self.weights:
            weight.grad = None

    def raise_it(self) -> None:
        raise Boom

    def grad_mode(self, mode: str, body: list[Any]) -> None:
        with GRAD_MODES[mode]():
            self.run(body)

    def region(self, which: Any, style: str, body: list[Any], catches: bool) -> None:
        region = self.made_or_new(which)
        if region is None:
            return
        entry = copy.copy(region) if self.copy_active and region in self.active else region
        self.active.append(region)
        try:
            getattr(self, style)(entry, lambda: self.run(body))
        except Boom:
            self.note("raised")
            if not catches:
                raise
        finally:
            self.active.pop()

    def made_or_new(self, which: Any) -> Any:
        if isinstance(which, int):
            return self.made[which % len(self.made)] if self.made else None
        try:
            self.made.append(self.autocast(*which))
        except (ValueError, RuntimeError) as refusal:
            self.log.append(type(refusal))
            return None
        return self.made[-1]

    # -- styles of entering a region --

    def in_with(self, region: Any, body: Callable[[], None]) -> None:
        with region:
            self.note("entered")
            body()

    def decorated(self, region: Any, body: Callable[[], None]) -> None:
        region(body)()

    def in_thread(self, region: Any, body: Callable[[], None]) -> None:
        raised: list[BaseException] = []

        def work() -> None:
            self.note("a new thread")
            try:
                self.in_with(region, body)
            except Boom as boom:
                raised.append(boom)
            self.note("the end of a thread")

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if raised:
            raise Boom

    def beside_a_thread(self, region: Any, body: Callable[[], None]) -> None:
        """Enter while another thread is inside; that thread leaves first, before the body runs."""
        other = copy.copy(region) if self.copy_active else region
        inside, go_on = threading.Event(), threading.Event()

        def work() -> None:
            with other:
                self.note("beside, inside")
                inside.set()
                go_on.wait()
            self.note("beside, outside")

        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert inside.wait(timeout=60)
            with region:
                go_on.set()
                thread.join()
                body()
        finally:
            go_on.set()

    def in_generator(self, ending: str, region: Any, body: Callable[[], None]) -> None:
        def generate() -> Iterator[None]:
            with region:
                yield
                self.note("resumed")

        generator = generate()
        next(generator)
        try:
            body()
        except Boom:
            generator.close()
            raise
        if ending == "exhaust":
            next(generator, None)
        elif ending == "close":
            generator.close()
        elif ending == "throw":
            generator.throw(Boom)
        else:
            del generator

    in_exhausted = functools.partialmethod(in_generator, "exhaust")
    in_closed = functools.partialmethod(in_generator, "close")
    in_deleted = functools.partialmethod(in_generator, "delete")
    in_thrown_into = functools.partialmethod(in_generator, "throw")


STYLES = ["in_with", "in_with", "in_with", "decorated", "in_thread", "beside_a_thread"]
STYLES += ["in_exhausted", "in_closed", "in_deleted", "in_thrown_into"]
NEW = st.tuples(
    st.sampled_from(["cpu", "cpu", "cpu", "cpu", "cuda", "vulkan", 3]),
    st.sampled_from([BF16, FP16, None, BF16, FP16, None, FP32]),
    st.sampled_from([True, True, False]),
    st.sampled_from([None, True, False]),
)
WHICH = st.one_of(NEW, NEW, st.integers(0, 3))
SIMPLE = st.one_of(
    st.tuples(st.just("op"), st.sampled_from(["linear", "linear", "matmul", "softmax", "layer_norm", "add"])),
    st.sampled_from([("op", "linear"), ("change_weights",), ("backward",), ("raise_it",)]),
)


def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    body = st.lists(inner, min_size=1, max_size=6)
    region = st.tuples(st.just("region"), WHICH, st.sampled_from(STYLES), body, st.booleans())
    return st.one_of(region, region, region, st.tuples(st.just("grad_mode"), st.sampled_from(sorted(GRAD_MODES)), body))


ONE_DEEP = around(SIMPLE)
TWO_DEEP = around(st.one_of(SIMPLE, SIMPLE, ONE_DEEP))
THREE_DEEP = around(st.one_of(SIMPLE, SIMPLE, ONE_DEEP, TWO_DEEP))
PROGRAMS = st.lists(THREE_DEEP, min_size=1, max_size=6)


def log_of(autocast: Any, program: list[Any], copy_active: bool = False) -> list[Any]:
    """Run a program; return its log, ending with whether the state is again what it was."""
    before = state()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        machine = Machine(autocast, copy_active, caught)
        for action in program:
            try:
                machine.run([action])
            except Boom:
                machine.note("raised to the top")
        machine.backward()
    machine.log.append(state() == before)
    put_back(before)
    return machine.log


@given(PROGRAMS)
def test_random_programs_do_what_they_do_under_torchs_regions(program: list[Any]) -> None:
    expected = log_of(torch.autocast, program, copy_active=True)
    assert expected[-1] is True
    got = log_of(castwise.autocast, program)
    for index, (ours, theirs) in enumerate(zip(got, expected, strict=False)):
        assert ours == theirs, f"entry {index} of the log"
    assert len(got) == len(expected)


@pytest.mark.parametrize("style", STYLES[2:])
@pytest.mark.parametrize("inner", [1, ("cpu", FP16, True, None), ("cpu", None, False, False)], ids=str)
def test_each_style_of_entering_a_region_inside_another(style: str, inner: Any) -> None:
    ops = [("op", "linear"), ("change_weights",), ("op", "linear"), ("op", "softmax")]
    nest = [("region", inner, style, ops, True), *ops]
    program = [("region", ("cpu", BF16, True, None), outer, nest, True) for outer in STYLES[2:]]
    assert log_of(castwise.autocast, program) == log_of(torch.autocast, program, copy_active=True)


@pytest.mark.parametrize("left", list(itertools.permutations(range(3))), ids=str)
def test_regions_left_in_any_order_do_what_torchs_do(left: tuple[int, ...]) -> None:
    def states(autocast: Any) -> list[Any]:
        before = state()
        regions = [autocast("cpu", dtype=BF16), autocast("cpu", dtype=FP16, cache_enabled=False)]
        regions.append(autocast("cpu", enabled=False))
        seen = []
        for region in regions:
            region.__enter__()
            seen.append(state())
        for index in left:
            regions[index].__exit__(None, None, None)
            seen.append(state())
        put_back(before)
        return seen

    assert states(castwise.autocast) == states(torch.autocast)


# -- the test of the test ---------------------------------------------------------------------------------------------


FOUND = settings(max_examples=2000, database=None, phases=[Phase.generate])


def test_the_programs_find_what_torch_forgets() -> None:
    def forgets(program: list[Any]) -> bool:
        return log_of(torch.autocast, program) != log_of(torch.autocast, program, copy_active=True)

    assert find(PROGRAMS, forgets, settings=FOUND)


class KeepsItsCasts(torch.autocast):
    """A region that never drops the casts of weights."""

    def __exit__(self, *exception: Any) -> None:
        torch.autocast_increment_nesting()
        super().__exit__(*exception)
        torch.autocast_decrement_nesting()


class ForgetsTheCacheSwitch(torch.autocast):
    """A region that leaves the cache's switch as it set it."""

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.set_autocast_cache_enabled(self._cache_enabled)


class WarnsTwice(torch.autocast):
    """A region that repeats a warning."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        torch.autocast(*arguments)


@pytest.mark.parametrize("wrong", [KeepsItsCasts, ForgetsTheCacheSwitch, WarnsTwice])
def test_the_programs_find_a_wrong_region(wrong: Any) -> None:
    def differs(program: list[Any]) -> bool:
        return log_of(wrong, program) != log_of(torch.autocast, program)

    assert find(PROGRAMS, differs, settings=FOUND)
