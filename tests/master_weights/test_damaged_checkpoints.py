"""`MasterWeights.load_state_dict` with damaged checkpoints: it raises before it changes anything."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.master_weights.training import buckets_of, same_bits, train, wrapped
from torch import nn, optim

from castwise import MasterWeights

SETTINGS: dict[str, dict[str, Any]] = {
    "split": {},
    "stochastic": {"method": "stochastic", "state_dtype": {"exp_avg": torch.bfloat16}},
    "float16": {"dtype": torch.float16},
}


def made(settings: dict[str, Any], steps: int) -> tuple[Any, MasterWeights]:
    torch.manual_seed(0)
    model = nn.Linear(40, 30)  # its weight is cut
    with buckets_of(4096):
        optimizer = MasterWeights(optim.AdamW(model.parameters(), lr=1e-2), model, **settings)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    return model, optimizer


def snapshot(model: Any, optimizer: MasterWeights) -> Any:
    return copy.deepcopy(
        (
            model.state_dict(),
            optimizer.state_dict(),
            (optimizer._chance.seed, optimizer._chance.steps()),
            [(weight.version, weight.kept_digests) for weight in optimizer._weights],
            torch.get_rng_state(),
        )
    )


def assert_unchanged(before: Any, after: Any) -> None:
    assert same_bits(after[0], before[0])
    assert after[1]["param_groups"] == before[1]["param_groups"]
    assert after[1]["state"].keys() == before[1]["state"].keys()
    assert all(same_bits(after[1]["state"][number], before[1]["state"][number]) for number in before[1]["state"])
    assert after[2:4] == before[2:4]
    assert torch.equal(after[4], before[4])


DAMAGES: dict[str, Callable[[Any], Any]] = {
    "a string": lambda value: "damaged",
    "nothing": lambda value: None,
    "a list": lambda value: [1, 2],
    "a dict": lambda value: {"a": 1},
    "another shape": lambda value: torch.zeros(2, 3, 5, dtype=getattr(value, "dtype", torch.float32)),
    "NaN": lambda value: torch.tensor(float("nan")),
    "complex": lambda value: torch.zeros(value.shape if torch.is_tensor(value) else (), dtype=torch.complex64),
    "sparse": lambda value: torch.zeros(3, 3).to_sparse(),
    "without values": lambda value: torch.zeros(value.shape if torch.is_tensor(value) else (), device="meta"),
    "removed": lambda value: REMOVED,
}
REMOVED = object()


def entries(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each entry of a state dict."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from entries(value, (*path, key))


def damaged(saved: Any, path: tuple[Any, ...], damage: Callable[[Any], Any]) -> Any:
    """A copy of a state dict in which one entry is damaged."""
    if not path:
        return damage(saved)
    copied = saved.copy()
    value = damaged(saved[path[0]], path[1:], damage)
    if value is REMOVED:
        del copied[path[0]]
    else:
        copied[path[0]] = value
    return copied


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_checkpoint_that_cannot_be_loaded_changes_nothing(settings: str) -> None:
    saved = made(SETTINGS[settings], 2)[1].state_dict()
    model, optimizer = made(SETTINGS[settings], 3)
    before = snapshot(model, optimizer)
    refused = set()
    for path in entries(saved):
        for name, damage in DAMAGES.items():
            try:
                optimizer.load_state_dict(damaged(saved, path, damage))
            except Exception as error:  # of entries of the inner optimizer, torch's errors are of any kind
                refused.add((path[-1], name, isinstance(error, ValueError)))
                assert_unchanged(before, snapshot(model, optimizer))
            else:  # torch takes it, too: another learning rate, a missing momentum
                model, optimizer = made(SETTINGS[settings], 3)

    def ours_of(entry: str) -> set[str]:
        return {name for key, name, is_ours in refused if key == entry and is_ours}

    ours = {path[-1] for path in entries(saved) if str(path[-1]).startswith("master_weights.")}
    numbers = ours & {"master_weights.seed", "master_weights.steps"}
    assert len(ours) > len(numbers) or settings == "stochastic"
    for entry in ours:
        expected = set(DAMAGES) - ({"removed"} if entry == "master_weights.row_digests" else set())
        expected -= {"nothing"} if entry == "master_weights.row_digests" else set()
        assert ours_of(entry) == expected, entry
    for entry in ("state", "param_groups", "params"):
        assert {"a string", "nothing", "removed"} <= {
            name for key, name, is_ours in refused if key == entry and is_ours
        }
    assert ours_of("exp_avg") == set(DAMAGES) - {"removed"}  # torch creates it again
    assert ours_of("step") == set(DAMAGES) - {"removed", "NaN"}


@pytest.mark.parametrize(
    ("entry", "value", "text"),
    [
        ("seed", torch.tensor(1.5), r"^'master_weights.seed' and 'master_weights.steps' must be integers"),
        ("steps", torch.tensor(-1), r"^'master_weights.seed' and 'master_weights.steps' must be integers, and the st"),
        ("seed", torch.tensor(7), r"must be the same for all weights, but the checkpoint has \[\(0, 2\), \(7, 2\)\]"),
    ],
)
def test_random_states_that_cannot_be_are_refused(entry: str, value: torch.Tensor, text: str) -> None:
    saved = made(SETTINGS["stochastic"], 2)[1].state_dict()
    model, optimizer = made(SETTINGS["stochastic"], 3)
    before = snapshot(model, optimizer)
    saved["state"][0][f"master_weights.{entry}"] = value
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(saved)
    assert_unchanged(before, snapshot(model, optimizer))


KINDS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda params: optim.AdamW(params, amsgrad=True),
    "fused AdamW": lambda params: optim.AdamW(params, fused=True),
    "Adagrad": optim.Adagrad,
    "ASGD": optim.ASGD,
    "Adafactor": lambda params: optim.Adafactor(params, lr=0.1),
    "Rprop": optim.Rprop,
    "a subclass": lambda params: type("Ours", (optim.AdamW,), {})(params),
}


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [None, [], {}, "1"], ids=repr)
def test_state_that_is_no_number_or_tensor_where_the_optimizer_keeps_one_is_refused(
    value: Any, kind: str, is_new: bool
) -> None:
    model, optimizer = wrapped(KINDS[kind])
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    if is_new and kind != "a subclass":  # what a foreign optimizer will keep is unknown
        model, optimizer = wrapped(KINDS[kind])
    for number in (0, max(saved["state"])):  # a 16-bit weight, and a bias
        before = snapshot(model, optimizer)
        for entry, kept in saved["state"][number].items():
            if entry.startswith("master_weights.") or (value is None and kind == "a subclass" and entry != "step"):
                continue
            if is_new and kind == "Adafactor" and entry == "variance":  # of a bias, and unknown before
                continue
            wanted = "a number" if kept.numel() == 1 else "a real tensor"
            with pytest.raises(ValueError, match=f"^{entry!r} of .* must be {wanted}, got {re.escape(repr(value))}: "):
                optimizer.load_state_dict(damaged(saved, ("state", number, entry), lambda _: value))
            assert_unchanged(before, snapshot(model, optimizer))


class Foreign(optim.Optimizer):
    """Keeps state as foreign optimizers do: a number that may become a tensor, 8-bit values, lists, what comes late."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            state["late"] = None if state["step"] < 2 else torch.zeros_like(param)
            state["state1"] = torch.zeros(param.shape, dtype=torch.uint8)
            state["absmax"], state["name"], state["factors"] = torch.ones(1), "blockwise", [torch.ones(2), [1, None]]
            param.sub_(0.1)


@pytest.mark.parametrize("steps", [(0, 1), (1, 2), (2, 1), (2, 0), (2, 2)])
def test_what_optimizers_save_at_any_time_is_loaded(steps: tuple[int, int]) -> None:
    def loaded(make: Callable[[Any], Any], change: Callable[[dict[str, Any]], Any] = lambda state: None) -> None:
        optimizers = []
        for number in steps:
            model, optimizer = wrapped(make)
            train(model, optimizer, number)
            optimizers.append(optimizer)
        saved = optimizers[0].state_dict()
        for state in saved["state"].values():
            if not all(name.startswith("master_weights.") for name in state):
                change(state)
        optimizers[1].load_state_dict(saved)
        assert optimizers[1].state_dict()["state"].keys() == saved["state"].keys()

    loaded(Foreign)
    loaded(lambda params: optim.SGD(params, lr=0.1, momentum=0.9), lambda state: state.update(momentum_buffer=None))
    for number in (2, 2.0, torch.tensor(2.0), torch.tensor([2])):
        loaded(optim.AdamW, lambda state, number=number: "step" in state and state.update(step=number))
    loaded(optim.AdamW, lambda state: state.update(max_exp_avg_sq=None, note="kept", nested=[[1], {}]))
    loaded(lambda params: optim.RMSprop(params, lr=0.1), lambda state: state.update(grad_avg=None))


def test_seeds_of_64_bits_are_saved() -> None:
    generator = torch.Generator().manual_seed(-1)
    _, optimizer = made({"method": "stochastic", "generator": generator}, 1)
    _, other = made({"method": "stochastic"}, 2)
    other.load_state_dict(optimizer.state_dict())
    assert other._chance.seed == generator.initial_seed() > 1 << 63


class FailsToLoad(optim.SGD):
    """Changes its groups and its state before its `load_state_dict` raises."""

    def load_state_dict(self, state_dict: Any) -> None:
        for group in self.param_groups:
            group["lr"] = 7.0
        self.state = {}  # type: ignore[assignment]
        raise RuntimeError("as optimizers may")


def test_an_inner_optimizer_that_fails_to_load_is_restored() -> None:
    model, optimizer = wrapped(lambda params: FailsToLoad(params, lr=0.1, momentum=0.9))
    train(model, optimizer, 2)
    before = snapshot(model, optimizer)
    with pytest.raises(RuntimeError, match="as optimizers may"):
        optimizer.load_state_dict(optimizer.state_dict())
    assert_unchanged(before, snapshot(model, optimizer))
