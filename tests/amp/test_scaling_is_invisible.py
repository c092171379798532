"""Random programs of two optimizers that share a parameter: the weights are those of the same calls without a scale."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import event, given
from hypothesis import strategies as st

from castwise.amp.grad_scaler import GradScaler

KINDS: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


class World:
    """Two optimizers with a parameter each and one in common, and every call that a training loop makes."""

    def __init__(self, scaler: GradScaler, kinds: tuple[int, int], momentum: float) -> None:
        draw = torch.Generator().manual_seed(0)
        self.own = [torch.nn.Parameter(torch.randn(3, generator=draw)) for _ in range(2)]
        self.shared = torch.nn.Parameter(torch.randn(2, 2, generator=draw))
        self.scaler = scaler
        self.optimizers = [
            torch.optim.SGD([own, self.shared], lr=0.1, momentum=momentum, **KINDS[kind])
            for own, kind in zip(self.own, kinds, strict=True)
        ]

    def backward(self, which: int, factor: float) -> None:
        loss = (self.own[which] * factor).sin().sum() + (self.shared * (factor + which)).cos().sum()
        self.scaler.scale(loss).backward()

    def zero_grad(self, which: int, set_to_none: bool) -> None:
        self.optimizers[which].zero_grad(set_to_none)

    def unscale_(self, which: int) -> None:
        self.scaler.unscale_(self.optimizers[which])

    def clip_grad_norm_(self, which: int, max_norm: float, norm_type: float) -> None:
        self.scaler.clip_grad_norm_(self.optimizers[which], max_norm, norm_type)

    def clip_grad_value_(self, which: int, value: float) -> None:
        self.scaler.clip_grad_value_(self.optimizers[which], value)

    def by_hand(self, which: int, in_place: bool) -> None:
        """Clip as a script does that has called `unscale_`."""
        for param in (self.own[which], self.shared):
            if param.grad is not None:
                if in_place:
                    param.grad.clamp_(-0.3, 0.3)
                else:
                    param.grad = param.grad.clamp(-0.3, 0.3)

    def step(self, which: int, closure: bool) -> None:
        if closure:
            self.scaler.step(self.optimizers[which], lambda: None)
        else:
            self.scaler.step(self.optimizers[which])

    def skip(self, which: int) -> None:
        self.scaler.skip(self.optimizers[which])

    def update(self) -> None:
        self.scaler.update()

    def round_trip(self) -> None:
        self.scaler = copy.deepcopy(self.scaler)


PREPARATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("clip_grad_norm_"), st.sampled_from([0.05, 0.5, 50.0]), st.sampled_from([1.0, 2.0, 3.0])),
        st.tuples(st.just("clip_grad_value_"), st.sampled_from([0.05, 0.5])),
    ),
    max_size=3,
)
TURN = st.tuples(
    st.lists(st.sampled_from([0.3, 1.0, 2.5]), min_size=1, max_size=3),
    st.booleans(),
    PREPARATIONS,
    st.sampled_from(["no", "in place", "out of place"]),
    st.sampled_from(["step", "step", "step", "closure", "skip"]),
)
ITERATIONS = st.lists(st.tuples(TURN, st.one_of(st.none(), TURN), st.booleans(), st.booleans()), min_size=1, max_size=4)


def turn(which: int, drawn: Any) -> list[tuple[Any, ...]]:
    """One optimizer's part of an iteration, after its gradients were zeroed."""
    factors, unscale, preparations, by_hand, ending = drawn
    calls: list[tuple[Any, ...]] = [("backward", which, factor) for factor in factors]
    calls += [("unscale_", which)] if unscale else []
    calls += [(name, which, *arguments) for name, *arguments in preparations]
    if by_hand != "no":
        if not unscale:
            calls += [("unscale_", which)]
        calls += [("by_hand", which, by_hand == "in place")]
    return [*calls, ("skip", which) if ending == "skip" else ("step", which, ending == "closure")]


@given(ITERATIONS, st.tuples(st.integers(0, 2), st.integers(0, 2)), st.sampled_from([0.0, 0.9]), st.booleans())
def test_the_weights_are_those_without_a_scale(
    iterations: list[Any], kinds: tuple[int, int], momentum: float, huge: bool
) -> None:
    scale = 2.0**60 if huge else 2.0**10
    scaled = World(GradScaler("cpu", init_scale=scale, growth_interval=2), kinds, momentum)
    plain = World(GradScaler("cpu", enabled=False), kinds, momentum)
    for first, second, set_to_none, save in iterations:
        calls = [("zero_grad", 0, set_to_none), ("zero_grad", 1, set_to_none), *turn(0, first)]
        if second is not None:
            calls += [("zero_grad", 1, set_to_none), *turn(1, second)]
        calls += [("update",)] + ([("round_trip",)] if save else [])
        for name, *arguments in calls:
            for world in (scaled, plain):
                getattr(world, name)(*arguments)
        event("two optimizers" if second is not None else "one")
        for ours, theirs in zip([*scaled.own, scaled.shared], [*plain.own, plain.shared], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
