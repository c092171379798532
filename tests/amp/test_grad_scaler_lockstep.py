"""Random programs, run into torch's scaler and ours: after every call the same bits, or the same kind of refusal."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import math
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

import castwise
from castwise.amp import _measure as measure
from castwise.amp._checkpoint import KEYS

FAULTS = {"inf": math.inf, "nan": math.nan, "huge": 1e38, "big": 3e19, "tiny": 1e-42, "none": None}


EVERY = 3  # instead of one parameter: all of an optimizer's have the fault


class World:
    """A scaler with six optimizers: for-loop in two groups, foreach and fused over mixed dtypes, sparse, fp16, fused.

    The first parameters have 6 elements, the others 4 and 2, so that thresholds on sizes lie between them.
    """

    half = torch.bfloat16

    def __init__(self, scaler_class: type[Any], init_scale: float, interval: int) -> None:
        self.scaler_class = scaler_class
        self.scaler = self.new_scaler(init_scale, interval)
        draw = torch.Generator().manual_seed(0)

        def parameters(*dtypes: torch.dtype) -> list[torch.nn.Parameter]:
            shapes = [(3, 2), (2, 2), (2, 1)]
            return [
                torch.nn.Parameter(torch.randn(shape, generator=draw).to(dtype))
                for shape, dtype in zip(shapes, dtypes, strict=False)
            ]

        single, double = torch.float32, torch.float64
        self.params = [
            parameters(single, single, single),
            parameters(single, self.half, double),
            parameters(single, self.half, double),
            parameters(single),
            parameters(torch.float16),
            parameters(single, single),
        ]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(
                [{"params": self.params[0][:1]}, {"params": self.params[0][1:], "lr": 0.2}],
                lr=0.1,
                momentum=0.9,
                foreach=False,
            ),
            torch.optim.AdamW(self.params[1], lr=0.1, foreach=True),
            torch.optim.AdamW(self.params[2], lr=0.1, fused=True),
            torch.optim.SparseAdam(self.params[3], lr=0.1),
            torch.optim.SGD(self.params[4], lr=0.1),
            torch.optim.Adam(self.params[5], lr=0.1, fused=True),
        ]

    def new_scaler(self, init_scale: float, interval: int) -> Any:
        return self.scaler_class("cpu", init_scale=init_scale, growth_interval=interval)

    def backward(self, which: int, fault: str, seed: int, faulty: int = EVERY, how: str = "sum") -> None:
        draw = torch.Generator().manual_seed(seed)
        losses = []
        for index, param in enumerate(self.params[which]):
            factor = torch.randn(param.shape, generator=draw)
            if FAULTS[fault] is not None and faulty in (index, EVERY):
                factor[1, 0] = FAULTS[fault]
            if which == 3:
                rows = torch.nn.functional.embedding(torch.tensor([0, 2, 2]), param, sparse=True)
                losses.append((rows * factor).sum())
            else:
                losses.append((param * factor.to(param.dtype)).sum().float())
        if how == "list":
            for loss in self.scaler.scale(losses):
                loss.backward()
        elif how == "retained":
            scaled = self.scaler.scale(sum(losses))
            scaled.backward(retain_graph=True)
            scaled.backward()
        else:
            self.scaler.scale(sum(losses)).backward()

    def zero_grad(self, which: int, set_to_none: bool) -> None:
        self.optimizers[which].zero_grad(set_to_none)

    def unscale(self, which: int) -> None:
        self.scaler.unscale_(self.optimizers[which])

    def step(self, which: int) -> Any:
        return self.scaler.step(self.optimizers[which])

    def update(self, new_scale: float | None) -> None:
        self.scaler.update(new_scale)

    def update_tensor(self, new_scale: float) -> None:
        self.scaler.update(torch.tensor(new_scale))

    def clip(self, which: int) -> torch.Tensor:
        grads = [param for param in self.params[which] if param.grad is not None and not param.grad.is_sparse]
        return torch.nn.utils.clip_grad_norm_(grads, 0.5)

    def forget_refused(self) -> None:
        """Drop the empty entries that torch makes for optimizers it refuses, and then will not pickle."""
        states = self.scaler._per_optimizer_states
        for key in [key for key, entry in states.items() if is_new(entry)]:
            del states[key]

    def reload(self, through_file: bool) -> dict[str, Any]:
        state = self.scaler.state_dict()
        if through_file:
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        self.scaler.load_state_dict(state)
        return torchs_part(state)

    def restart(self) -> None:
        state = self.scaler.state_dict()
        self.scaler = self.new_scaler(1.0, 7)
        self.scaler.load_state_dict(state)

    def unpickle(self) -> None:
        self.scaler = pickle.loads(pickle.dumps(self.scaler))

    def deepcopy(self) -> None:
        self.scaler = copy.deepcopy(self.scaler)

    def settings(self, growth: float, backoff: float, interval: int) -> None:
        self.scaler.set_growth_factor(growth)
        self.scaler.set_backoff_factor(backoff)
        self.scaler.set_growth_interval(interval)

    def facts(self) -> list[Any]:
        """Everything that can be seen of this world, as bits."""
        scaler = self.scaler
        seen: list[Any] = [
            scaler.get_scale(),
            scaler._get_growth_tracker(),
            torchs_part(scaler.state_dict()),
            bits(scaler._scale),
            bits(scaler._growth_tracker),
        ]
        for params, optimizer in zip(self.params, self.optimizers, strict=True):
            seen += [[bits(param.detach()), bits(param.grad)] for param in params]
            seen += [[bits(value) for value in state.values()] for state in optimizer.state.values()]
            entry = scaler._per_optimizer_states.get(id(optimizer))
            if entry is not None and not is_new(entry):
                found = any(found_inf.item() for found_inf in entry["found_inf_per_device"].values())
                seen.append((entry["stage"].name, found))
            seen += [hasattr(optimizer, "grad_scale"), hasattr(optimizer, "found_inf")]
        return seen


def torchs_part(state: dict[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in KEYS}


def is_new(entry: dict[str, Any]) -> bool:
    return entry["stage"].name == "READY" and not entry["found_inf_per_device"]


def bits(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_sparse:
        return bits(value._indices()), bits(value._values())
    return value.dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).tolist()


WHICH = st.integers(0, 5)
FAULTY = st.sampled_from([EVERY, 0, 1, 2])
FINITE_SCALE = st.sampled_from([2.0**-3, 1.0, 3.0, 1024.0, 2.0**24])
ACTIONS = st.one_of(
    st.tuples(
        st.just("backward"),
        WHICH,
        st.sampled_from([*FAULTS, "none", "none", "none"]),
        st.integers(0, 99),
        FAULTY,
        st.sampled_from(["sum", "list", "retained"]),
    ),
    st.tuples(st.just("zero_grad"), WHICH, st.booleans()),
    st.tuples(st.just("unscale"), WHICH),
    st.tuples(st.just("step"), WHICH),
    st.tuples(st.just("step"), WHICH),
    st.tuples(st.just("update"), st.none()),
    st.tuples(st.just("update"), st.none()),
    st.tuples(st.just("update"), FINITE_SCALE),
    st.tuples(st.just("update_tensor"), FINITE_SCALE),
    st.tuples(st.just("clip"), WHICH),
    st.tuples(st.just("reload"), st.booleans()),
    st.tuples(st.just("restart")),
    st.tuples(st.just("unpickle")),
    st.tuples(st.just("deepcopy")),
    st.tuples(
        st.just("settings"), st.sampled_from([1.5, 2.0]), st.sampled_from([0.5, 0.3]), st.sampled_from([1, 2, 5])
    ),
)
ITERATION = st.tuples(
    WHICH, st.sampled_from(sorted(FAULTS)), st.integers(0, 99), FAULTY, st.booleans(), st.booleans()
).map(
    lambda drawn: [
        ("zero_grad", drawn[0], drawn[4]),
        ("backward", *drawn[:4]),
        *([("unscale", drawn[0]), ("clip", drawn[0])] if drawn[5] else []),
        ("step", drawn[0]),
        ("update", None),
    ]
)
PROGRAMS = st.lists(st.one_of(ITERATION, ITERATION, ACTIONS.map(lambda action: [action])), min_size=2, max_size=14).map(
    lambda parts: list(itertools.chain.from_iterable(parts))
)


def outcome(world: World, name: str, arguments: list[Any]) -> tuple[Any, str]:
    """Return the result as bits, or the kind of refusal and its text."""
    try:
        return bits(getattr(world, name)(*arguments)), ""
    except (RuntimeError, ValueError, AssertionError, AttributeError) as refusal:
        # torch asserts where we raise RuntimeError.
        return RuntimeError if isinstance(refusal, AssertionError) else type(refusal), str(refusal)


def deliberately_different(theirs: World, refusal: str) -> str | None:
    """Name the documented difference that the last action ran into, if it did."""
    # Torch asserts, or hands the fused optimizer an int for found_inf.
    if ("No inf checks were recorded" in refusal or "'int' object has no attribute" in refusal) and any(
        not entry["found_inf_per_device"] and entry["stage"].name != "READY"
        for entry in theirs.scaler._per_optimizer_states.values()
    ):
        return "an optimizer without gradients"
    for params, optimizer in zip(theirs.params, theirs.optimizers, strict=True):
        entry = theirs.scaler._per_optimizer_states.get(id(optimizer))
        if entry is None or entry["stage"].name == "READY":
            continue
        finite = not any(found_inf.item() for found_inf in entry["found_inf_per_device"].values())
        grads = [param.grad.to_dense() for param in params if param.grad is not None]
        if finite and not all(grad.isfinite().all() for grad in grads):
            return "unscaling made a gradient infinite"
    return None


# Numbers of elements from which gradients on a CPU are checked in another way; parameters are on both sides.
THRESHOLDS = st.tuples(st.sampled_from([0, 5, 7, measure._SMALL]), st.sampled_from([0, 5, measure._LARGE]))


@contextlib.contextmanager
def thresholds(small: int, large: int) -> Iterator[None]:
    with mock.patch.object(measure, "_SMALL", small), mock.patch.object(measure, "_LARGE", large):
        yield


@given(PROGRAMS, st.sampled_from([2.0**-2, 1.0, 1024.0, 2.0**16, 2.0**30]), st.sampled_from([1, 2, 3]), THRESHOLDS)
def test_random_programs_give_the_same_bits_as_torch(
    program: list[Any], init_scale: float, interval: int, sizes: tuple[int, int]
) -> None:
    with thresholds(*sizes):
        run_in_lockstep(program, init_scale, interval)


def run_in_lockstep(program: list[Any], init_scale: float, interval: int) -> None:
    theirs = World(torch.amp.GradScaler, init_scale, interval)
    ours = World(castwise.GradScaler, init_scale, interval)
    for name, *arguments in program:
        expected, refusal = outcome(theirs, name, arguments)
        got, _ = outcome(ours, name, arguments)
        theirs.forget_refused()
        difference = deliberately_different(theirs, refusal)
        if difference is not None:
            event(difference)
            return
        assert got == expected, (name, arguments)
        assert ours.facts() == theirs.facts(), (name, arguments)
    event("ran to the end")


class ClippingWorld(World):
    """A world in which clipping is folded into unscaling, or follows it as torch does it."""

    half = torch.float32  # two roundings to bf16 are not one

    def __init__(self, scaler_class: type[Any], init_scale: float, interval: int) -> None:
        super().__init__(scaler_class, init_scale, interval)
        self.unscaled_by_clipping: set[int] = set()
        self.overflowed = False

    def clip_grad_norm_(self, which: int, max_norm: float, norm_type: float) -> bool:
        """Clip, and return True if the gradients are finite."""
        optimizer = self.optimizers[which]
        if isinstance(self.scaler, castwise.GradScaler):
            return math.isfinite(self.scaler.clip_grad_norm_(optimizer, max_norm, norm_type).item())
        entry = self.scaler._per_optimizer_states.get(id(optimizer))
        if entry is None or entry["stage"].name != "UNSCALED":
            self.scaler.unscale_(optimizer)
            self.unscaled_by_clipping.add(which)
        grads = [param.grad.coalesce() if param.grad.is_sparse else param.grad for param in self.with_gradient(which)]
        values = [grad._values() if grad.is_sparse else grad for grad in grads]
        reals = [torch.view_as_real(value) if value.is_complex() else value for value in values]
        norm = torch.linalg.vector_norm(
            torch.cat([real.flatten().double() for real in [*reals, torch.zeros(1)]]), norm_type
        )
        finite = all(bool(real.isfinite().all()) for real in reals)
        if finite:
            for param, grad in zip(self.with_gradient(which), grads, strict=True):
                param.grad = grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(torch.float32))
        return finite

    def with_gradient(self, which: int) -> list[torch.nn.Parameter]:
        return [param for param in self.params[which] if param.grad is not None]

    def unscale(self, which: int) -> None:
        if which in self.unscaled_by_clipping:
            self.unscaled_by_clipping.discard(which)  # asked for once more than torch allows
            entry = self.scaler._per_optimizer_states[id(self.optimizers[which])]
            assert entry["stage"].name == "UNSCALED"
        else:
            super().unscale(which)

    def update(self, new_scale: float | None) -> None:
        super().update(new_scale)
        self.unscaled_by_clipping.clear()

    def agree(self, other: ClippingWorld) -> None:
        """Compare all that clipping leaves comparable: the decisions exactly, numbers to rounding errors."""
        assert torchs_part(self.scaler.state_dict()) == torchs_part(other.scaler.state_dict())
        for ours, theirs in zip(self.optimizers, other.optimizers, strict=True):
            entries = [world.scaler._per_optimizer_states.get(id(o)) for world, o in ((self, ours), (other, theirs))]
            found = [
                e and e["stage"].name == "STEPPED" and any(map(bool, e["found_inf_per_device"].values()))
                for e in entries
            ]
            assert bool(found[0]) == bool(found[1])
        for ours, theirs in zip(self.params, other.params, strict=True):
            for our_param, their_param in zip(ours, theirs, strict=True):
                torch.testing.assert_close(our_param, their_param, rtol=1e-5, atol=1e-6)


CLIPPED_ITERATION = st.tuples(
    WHICH,
    st.sampled_from(["none", "none", "inf", "nan"]),
    st.integers(0, 99),
    FAULTY,
    st.sampled_from([0.0, 0.5, 2.0, math.inf]),
    st.sampled_from([1.0, 2.0, 3.0, math.inf]),
    st.permutations(["clip_grad_norm_", "unscale", "clip_grad_norm_"]),
    st.integers(0, 3),
).map(
    lambda drawn: [
        ("zero_grad", drawn[0], True),
        ("backward", *drawn[:4]),
        *[(name, drawn[0], *(drawn[4:6] if name != "unscale" else ())) for name in drawn[6][: drawn[7]]],
        ("step", drawn[0]),
        ("update", None),
    ]
)
CLIPPED_ACTIONS = st.one_of(
    st.tuples(st.just("backward"), WHICH, st.sampled_from(["inf", "none", "none"]), st.integers(0, 99), FAULTY),
    st.tuples(st.just("clip_grad_norm_"), WHICH, st.sampled_from([0.5, 2.0]), st.sampled_from([2.0, math.inf])),
    st.tuples(st.just("unscale"), WHICH),
    st.tuples(st.just("step"), WHICH),
    st.tuples(st.just("update"), st.none()),
)
CLIPPED_PROGRAMS = st.lists(
    st.one_of(CLIPPED_ITERATION, CLIPPED_ITERATION, CLIPPED_ACTIONS.map(lambda action: [action])),
    min_size=2,
    max_size=10,
).map(lambda parts: list(itertools.chain.from_iterable(parts)))


@given(CLIPPED_PROGRAMS, st.sampled_from([2.0**-2, 1.0, 1024.0, 2.0**16]), st.sampled_from([1, 3]), THRESHOLDS)
def test_random_clipped_programs_take_and_skip_the_same_steps_as_torch(
    program: list[Any], init_scale: float, interval: int, sizes: tuple[int, int]
) -> None:
    with thresholds(*sizes):
        run_clipped_in_lockstep(program, init_scale, interval)


def run_clipped_in_lockstep(program: list[Any], init_scale: float, interval: int) -> None:
    theirs = ClippingWorld(torch.amp.GradScaler, init_scale, interval)
    ours = ClippingWorld(castwise.GradScaler, init_scale, interval)
    clipped_since_the_update: set[int] = set()
    for name, *arguments in program:
        if name == "backward" and arguments[0] in clipped_since_the_update:
            event("a scaled gradient was added to an unscaled one")
            return
        expected, refusal = outcome(theirs, name, arguments)
        got, _ = outcome(ours, name, arguments)
        theirs.forget_refused()
        if deliberately_different(theirs, refusal) is not None:
            event("a documented difference")
            return
        if name in ("clip_grad_norm_", "unscale", "step"):
            clipped_since_the_update.add(arguments[0])
        if name == "update":
            clipped_since_the_update.clear()
        assert got == expected, (name, arguments)
        ours.agree(theirs)
    event("ran to the end")


def test_the_comparison_sees_a_single_wrong_bit() -> None:
    theirs, ours = World(torch.amp.GradScaler, 1024.0, 2), World(castwise.GradScaler, 1024.0, 2)
    for world in (theirs, ours):
        world.backward(0, "none", 0)
    ours.params[0][0].grad.view(-1).view(torch.int32)[0] ^= 1
    assert ours.facts() != theirs.facts()


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_each_fault_does_what_its_name_says(fault: str) -> None:
    world = World(torch.amp.GradScaler, 2.0**16, 100)
    world.backward(0, fault, 0)
    world.step(0)
    skipped = world.scaler._per_optimizer_states[id(world.optimizers[0])]["found_inf_per_device"]
    assert bool(sum(skipped.values()).item()) == (fault in {"inf", "nan", "huge"})
