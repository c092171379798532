"""`GradScaler`, call by call: what it does, and what it refuses. Where torch's is wrong is in `test_torch_is_wrong`."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import pickle
import re
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from tests.amp.scalers import agreeing
from torch.utils._pytree import tree_leaves

from castwise.amp import _measure as measure
from castwise.amp._readback import Flag, Readback
from castwise.amp.grad_scaler import GradScaler, OptState, _MultiDeviceReplicator
from castwise.schedules import Headroom, Static


class Losses(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def weight(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values))


def ready(*, scale: float = 4.0, fused: bool = False) -> tuple[GradScaler, torch.optim.Optimizer, torch.nn.Parameter]:
    """A scaler and an optimizer whose gradient is [1, 1] times the scale."""
    scaler, param = GradScaler("cpu", init_scale=scale), weight(1.0, 2.0)
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    scaler.scale(param.sum()).backward()
    return scaler, optimizer, param


# -- scale ------------------------------------------------------------------------------------------------------------


def test_containers_come_back_as_what_they_were() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    one, two = torch.tensor(1.0), torch.tensor([2.0], dtype=torch.float64)
    scaled = scaler.scale([one, (two, [one]), Losses(one, two)])
    assert scaled == [torch.tensor(8.0), (torch.tensor([16.0]), [torch.tensor(8.0)]), Losses(8.0, 16.0)]
    assert type(scaled[2]) is Losses
    assert scaled[1][0].dtype is torch.float64
    generator = scaler.scale(loss for loss in (one, two))
    assert inspect.isgenerator(generator)
    assert list(generator) == [torch.tensor(8.0), torch.tensor([16.0])]


@pytest.mark.parametrize("outputs", [1.0, None, "loss", b"loss", {"a": torch.ones(())}, [torch.ones(()), "loss"]])
def test_what_is_not_a_tensor_is_not_scaled(outputs: Any) -> None:
    with pytest.raises(
        ValueError, match="outputs must be a Tensor or an iterable of Tensors: scale\\(\\) cannot scale "
    ):
        GradScaler("cpu").scale(outputs)


def test_the_scale_is_made_with_the_first_loss_on_its_device() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    assert scaler._scale is None
    assert scaler._get_scale_async() is None
    assert scaler.get_scale() == 8.0
    scaler.scale(torch.ones(2, device="meta"))
    assert scaler._scale is not None
    assert scaler._scale.device.type == "meta"
    with pytest.raises(RuntimeError, match="the growth tracker is set but the scale is not"):
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))


def test_copies_for_devices_are_made_once_and_never_the_master() -> None:
    master = torch.ones(())
    copies = _MultiDeviceReplicator(master)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert copies.get(cpu) is copies.get(cpu)
    assert copies.get(cpu) is not master
    assert copies.get(meta).device == meta


# -- order of calls ---------------------------------------------------------------------------------------------------

WRONG_ORDERS: list[tuple[str, list[str], str]] = [
    ("unscale_ before scale", ["unscale_"], "unscale_() needs a scale, which the first scale() creates"),
    ("step before scale", ["step"], "step() needs a scale, which the first scale() creates"),
    ("update before scale", ["update"], "update() needs a scale, which the first scale() creates"),
    ("update without a step", ["scale", "update"], "Call scaler.step(optimizer) or scaler.unscale_"),
    ("unscale_ twice", ["scale", "unscale_", "unscale_"], "Call it once per step, and scaler.update() after the step"),
    (
        "unscale_ after step",
        ["scale", "step", "unscale_"],
        "Call it before step(), or call scaler.update() first to begin",
    ),
    ("step twice", ["scale", "step", "step"], "Call scaler.update() once per iteration, after the last step()"),
    ("update twice", ["scale", "step", "update", "update"], "No inf checks were recorded prior to update"),
    ("pickle in an iteration", ["scale", "step", "pickle"], "call scaler.update() first"),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("calls", "message"), [row[1:] for row in WRONG_ORDERS], ids=[row[0] for row in WRONG_ORDERS])
def test_calls_out_of_order_say_what_to_call_and_change_nothing(calls: list[str], message: str, fused: bool) -> None:
    scaler, param = GradScaler("cpu", init_scale=4.0), weight(1.0, 2.0)
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    actions: dict[str, Callable[[], Any]] = {
        "scale": lambda: scaler.scale(param.sum()).backward(),
        "unscale_": lambda: scaler.unscale_(optimizer),
        "step": lambda: scaler.step(optimizer),
        "update": scaler.update,
        "pickle": lambda: pickle.dumps(scaler),
    }
    for name in calls[:-1]:
        actions[name]()
    grad = None if param.grad is None else param.grad.clone()
    before = param.detach().clone(), scaler.state_dict()
    with pytest.raises(RuntimeError, match=re.escape(message)):
        actions[calls[-1]]()
    assert torch.equal(param, before[0])
    assert scaler.state_dict() == before[1]
    assert grad is None if param.grad is None else torch.equal(param.grad, grad)


@pytest.mark.parametrize("fused", [False, True])
def test_the_stage_of_an_optimizer_can_be_followed(fused: bool) -> None:
    scaler, optimizer, _ = ready(fused=fused)
    stages = [scaler._per_optimizer_states[id(optimizer)]["stage"]]
    for call in (scaler.unscale_, scaler.step):
        call(optimizer)
        stages.append(scaler._per_optimizer_states[id(optimizer)]["stage"])
    assert stages == [OptState.READY, OptState.UNSCALED, OptState.STEPPED]
    assert {device.type for device in scaler._found_inf_per_device(optimizer)} == {"cpu"}
    scaler.update()
    assert not scaler._per_optimizer_states


# -- step -------------------------------------------------------------------------------------------------------------


class Recording(torch.optim.SGD):
    """An SGD that remembers how it was called."""

    def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self.called_with = args, kwargs
        return "returned"


def test_arguments_and_the_return_value_pass_through() -> None:
    scaler, _, param = ready()
    optimizer = Recording([param], lr=1.0)
    assert scaler.step(optimizer, None, 3, closure_like=5) == "returned"
    assert optimizer.called_with == ((None, 3), {"closure_like": 5})


def test_none_in_the_place_of_a_closure_is_fine() -> None:
    for arguments in [(None,), ()]:
        scaler, optimizer, param = ready()
        scaler.step(optimizer, *arguments, **({} if arguments else {"closure": None}))
        assert param.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_returns_none_and_leaves_the_weights(fused: bool) -> None:
    scaler, optimizer, param = ready(fused=fused)
    param.grad[0] = torch.inf
    assert scaler.step(optimizer) is None
    scaler.update()
    assert param.tolist() == [1.0, 2.0]
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scale_of_the_users_takes_part_in_a_fused_step(unscale: bool) -> None:
    scaler, optimizer, param = ready(fused=True)
    optimizer.grad_scale = torch.tensor(2.0)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert param.tolist() == [0.5, 1.5]
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_an_error_in_a_fused_step_leaves_the_optimizer_as_it_was() -> None:
    scaler, optimizer, param = ready(fused=True)
    optimizer.grad_scale = mine = torch.tensor(2.0)
    optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("mine")))
    with pytest.raises(KeyError, match="mine"):
        scaler.step(optimizer)
    assert optimizer.grad_scale is mine
    assert not hasattr(optimizer, "found_inf")
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    assert torch.equal(param.grad, torch.full((2,), 4.0))


def test_found_infs_of_several_devices_combine_to_exactly_one() -> None:
    found_infs = [torch.tensor(1.0), torch.tensor([1.0]), torch.tensor(0.0)]
    assert torch.equal(measure.combine(found_infs, torch.ones(())), torch.tensor(1.0))
    assert torch.equal(measure.combine(found_infs[2:], torch.ones(())), torch.tensor(0.0))


class TakesScaler(torch.optim.SGD):
    """The deprecated contract: the optimizer is given the scaler and does everything itself."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> str:  # type: ignore[override]
        self.given = grad_scaler
        (found_inf,) = grad_scaler._check_inf_per_device(self).values()
        if not found_inf.item():
            grad_scaler.unscale_(self)
            super().step()
        return "own"


@pytest.mark.parametrize("bad", [False, True])
def test_an_optimizer_that_takes_the_scaler_gets_it(bad: bool) -> None:
    scaler, _, param = ready()
    optimizer = TakesScaler([param], lr=1.0)
    if bad:
        param.grad[0] = torch.nan
    with pytest.warns(FutureWarning, match=r"step\(grad_scaler=...\) is deprecated") as caught:
        assert scaler.step(optimizer) == "own"
    assert caught[0].filename == __file__
    assert optimizer.given is scaler
    scaler.update()
    assert param.tolist() == ([1.0, 2.0] if bad else [0.0, 1.0])
    assert scaler.get_scale() == (2.0 if bad else 4.0)


# -- members that subclasses and frameworks replace -------------------------------------------------------------------


class Vetoing(GradScaler):
    """A subclass that finds inf where castwise does not."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return {device: torch.ones_like(flag) for device, flag in found.items()}


@pytest.mark.parametrize("fused", [False, True])
def test_an_overridden_unscale_grads_decides(fused: bool) -> None:
    scaler, param = Vetoing("cpu", init_scale=4.0), weight(1.0, 2.0)
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [1.0, 2.0]
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("fused", [False, True])
def test_an_unscale_grads_replaced_on_the_instance_decides(fused: bool) -> None:
    # The way scripts let fp16 weights through.
    scaler, param = GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    original = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda opt, inv_scale, found_inf, _: original(opt, inv_scale, found_inf, True)  # type: ignore[method-assign]
    scaler.scale(param.float().sum()).backward()
    scaler.step(optimizer)
    assert param.tolist() == [0.0, 0.0]


def test_an_overridden_maybe_opt_step_decides() -> None:
    class Always(GradScaler):
        def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
            return "always", sum(flag.item() for flag in optimizer_state["found_inf_per_device"].values())

    scaler, param = Always("cpu", init_scale=4.0), weight(1.0)
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(param.sum() * torch.inf).backward()
    assert scaler.step(optimizer) == ("always", 1.0)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_found_inf_that_a_tool_changes_before_the_step_decides(in_place: bool, fused: bool) -> None:
    # As tools do that reduce it over ranks.
    scaler, optimizer, param = ready(fused=fused)
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    if in_place:
        for found_inf in found.values():
            found_inf.fill_(1.0)
    else:
        found.update({device: torch.ones(()) for device in found})
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [1.0, 2.0]
    assert scaler.get_scale() == 2.0


def test_an_update_that_resets_the_states_as_torchs_does_leaves_ours_working() -> None:
    scaler, optimizer, param = ready()
    scaler.step(optimizer)
    scaler._per_optimizer_states = type(scaler._per_optimizer_states)(scaler._per_optimizer_states.default_factory)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()


# -- update, getters, setters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "new_scale", [1024, 1024.0, torch.tensor(1024.0), torch.tensor([1024]), torch.ones(1, 1) * 1024]
)
def test_update_takes_any_number(new_scale: Any) -> None:
    scaler, _, _ = ready()
    scale = scaler._scale
    scaler.update(new_scale)
    assert scaler.get_scale() == 1024.0
    assert scaler._scale is scale
    assert scaler._get_growth_tracker() == 0


@pytest.mark.parametrize(
    ("new_scale", "error"),
    [
        (0.0, ValueError),
        (-1, ValueError),
        (torch.inf, ValueError),
        (torch.tensor(torch.nan), ValueError),
        (torch.tensor(0.0), ValueError),
        ("2", TypeError),
        (True, TypeError),
        (torch.ones(2), TypeError),
        (torch.ones((), requires_grad=True), TypeError),
        (torch.ones((), device="meta"), TypeError),
    ],
)
def test_update_refuses_what_cannot_be_a_scale_and_changes_nothing(new_scale: Any, error: type[Exception]) -> None:
    scaler, optimizer, _ = ready()
    scaler.step(optimizer)
    with pytest.raises(error, match=r"new_scale must be "):
        scaler.update(new_scale)
    assert scaler.get_scale() == 4.0
    scaler.update()  # the step is still on record


def test_setters_set_what_getters_get() -> None:
    scaler = GradScaler("cpu")
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 7)
    assert (scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval) == (3.0, 0.25, 7)


def test_a_disabled_scaler_passes_through_and_answers_everything() -> None:
    scaler, param = GradScaler("cpu", init_scale=0.0, enabled=False), weight(1.0)
    optimizer = torch.optim.SGD([param], lr=1.0)
    loss = param.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    scaler.step_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    assert not param._post_accumulate_grad_hooks  # none is needed, as nothing is unscaled
    scaler.step(optimizer, lambda: None)
    scaler.step(optimizer)
    scaler.update()
    scaler.update(5.0)
    scaler.load_state_dict({"scale": "nonsense"})
    assert param.item() == -1.0
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1.0
    assert scaler._get_growth_tracker() == 0
    assert scaler.state_dict() == {}
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.0, 0.5, 2000)
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_a_scaler_for_missing_cuda_warns_once_and_is_off() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available") as caught:
        scaler = GradScaler()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert not scaler.is_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradScaler(enabled=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled, but CUDA:UserWarning")
@pytest.mark.parametrize(
    ("device", "numbers"),
    [
        ("cuda", {"growth_factor": 0.5}),
        ("cuda", {"init_scale": -1.0, "growth_interval": None}),
        ("cuda:0", {}),
        (torch.device("cuda"), {}),
    ],
)
def test_without_cuda_a_scaler_is_on_where_torchs_is(device: Any, numbers: dict[str, Any]) -> None:
    """Numbers of a scaler that disables itself are not checked: the script runs, as with torch."""
    theirs, ours = (cls(device, **numbers) for cls in (torch.amp.GradScaler, GradScaler))
    assert ours.is_enabled() is theirs.is_enabled()
    assert ours.scale(torch.ones(())) == theirs.scale(torch.ones(()))


# -- saving and loading -----------------------------------------------------------------------------------------------

STATE = {"scale": 8.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 5, "_growth_tracker": 4}


def saved(scaler: Any) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(scaler.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(("source", "target"), [(GradScaler, torch.amp.GradScaler), (torch.amp.GradScaler, GradScaler)])
def test_checkpoints_go_both_ways_between_torchs_scaler_and_ours(source: Any, target: Any, started: bool) -> None:
    first, second = source("cpu"), target("cpu")
    first.load_state_dict(STATE)
    if started:
        first.scale(torch.ones(()))
        second.scale(torch.ones(()))
    second.load_state_dict(saved(first))
    assert second.state_dict().items() >= STATE.items()
    assert saved(second).items() >= STATE.items()
    scaled = second.scale(torch.ones(()))
    assert scaled.item() == 8.0


BAD_STATES = [
    ({"scale": None}, TypeError, "scale must be a number, got None of type NoneType"),
    ({"scale": 0.0}, ValueError, "scale must be a finite number > 0"),
    ({"scale": float("nan")}, ValueError, "scale must be a finite number > 0"),
    ({"scale": torch.ones(())}, TypeError, "scale must be a number, got tensor"),
    ({"growth_factor": 1.0}, ValueError, "growth_factor must be a finite number > 1, got 1.0"),
    ({"backoff_factor": float("inf")}, ValueError, "backoff_factor must be in"),
    ({"growth_interval": 2.5}, TypeError, "growth_interval must be an integer"),
    ({"_growth_tracker": -1}, ValueError, "_growth_tracker must be an integer in"),
    ({"_growth_tracker": 2**31}, ValueError, "_growth_tracker must be an integer in"),
    ({"_growth_tracker": "4"}, TypeError, "_growth_tracker must be an integer"),
    ({"more": 1}, ValueError, "unknown ['more']"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_STATES)
def test_a_bad_state_dict_is_refused_and_changes_nothing(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    scaler, _, _ = ready()
    before = scaler.state_dict(), scaler._init_scale, scaler._init_growth_tracker
    with pytest.raises(error, match=re.escape(message)):
        scaler.load_state_dict(STATE | change)
    assert (scaler.state_dict(), scaler._init_scale, scaler._init_growth_tracker) == before


@pytest.mark.parametrize("name", STATE)
def test_a_missing_entry_is_named_and_is_a_key_error_as_in_torch(name: str) -> None:
    with pytest.raises(
        ValueError, match="^" + re.escape(f"'{name}': ") + ".*" + re.escape(f"missing ['{name}']")
    ) as caught:
        GradScaler("cpu").load_state_dict({key: value for key, value in STATE.items() if key != name})
    assert isinstance(caught.value, KeyError)


def test_an_empty_state_dict_or_none_at_all_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Do not load it, or load it into a disabled scaler"):
        GradScaler("cpu").load_state_dict({})
    with pytest.raises(TypeError, match=r"state_dict must be a mapping from state_dict\(\), got list"):
        GradScaler("cpu").load_state_dict([])  # type: ignore[arg-type]


class Named(GradScaler):
    name = "default"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_has_every_number_and_shares_nothing(duplicate: Callable[[Any], Any]) -> None:
    scaler = Named("cpu")
    scaler.name = "mine"
    scaler.scale(torch.ones(()))
    scaler.load_state_dict({**STATE, "steps_taken": 7, "steps_skipped": 2, "skips_in_a_row": 1})
    twin = duplicate(scaler)
    assert type(twin) is Named
    assert twin.name == "mine"
    assert twin.state_dict() == {**STATE, "steps_taken": 7, "steps_skipped": 2, "skips_in_a_row": 1}
    twin.scale(torch.ones(()))
    twin.update(2.0)
    assert scaler.get_scale() == 8.0


# -- gradients of every kind ------------------------------------------------------------------------------------------


def test_complex_and_sparse_and_empty_gradients_step_as_without_a_scaler() -> None:
    def train(scaler: GradScaler) -> list[torch.Tensor]:
        embedding = torch.nn.Parameter(torch.arange(8.0).view(4, 2))
        params = [torch.nn.Parameter(torch.tensor([1 + 2j, 3j])), torch.nn.Parameter(torch.empty(0)), embedding]
        optimizer = torch.optim.SGD(params, lr=0.5)
        for _ in range(2):
            rows = torch.nn.functional.embedding(torch.tensor([1, 1, 3]), embedding, sparse=True)
            loss = (params[0] * (2 - 1j)).abs().sum() + params[1].sum() + (rows**2).sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [param.detach() for param in params]

    for got, expected in zip(train(GradScaler("cpu")), train(GradScaler("cpu", enabled=False)), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("part", [complex("inf"), complex(0, float("nan"))])
def test_a_non_finite_part_of_a_complex_gradient_skips_the_step(part: complex) -> None:
    scaler = GradScaler("cpu")
    param = torch.nn.Parameter(torch.tensor([1j, 2j]))
    scaler.scale(torch.ones(()))
    param.grad = torch.tensor([1j, part])
    scaler.step(torch.optim.SGD([param], lr=1.0))
    assert param.tolist() == [1j, 2j]


def test_fp16_gradients_are_refused_before_anything_is_written() -> None:
    scaler, param, half = GradScaler("cpu", init_scale=4.0), weight(1.0), torch.nn.Parameter(torch.ones(1).half())
    optimizer = torch.optim.SGD([param, half], lr=1.0)
    scaler.scale(param.sum() + half.float().sum()).backward()
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            call(optimizer)
        assert param.grad.item() == 4.0
        assert param.item() == 1.0


def test_losses_scalers_and_optimizers_mix_as_without_scaling() -> None:
    def train(first: GradScaler, second: GradScaler) -> list[float]:
        a, b = weight(1.0), weight(2.0)
        optimizers = [torch.optim.AdamW([a], lr=0.1), torch.optim.SGD([b], lr=0.1)]
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            shared = a * b
            first.scale(shared.sin().sum()).backward(retain_graph=True)
            first.step(optimizers[0])
            optimizers[1].zero_grad()
            second.scale(b.exp().sum()).backward()
            second.step(optimizers[1])
            first.update()
            second.update()
        return [a.item(), b.item()]

    off = GradScaler("cpu", enabled=False)
    assert train(GradScaler("cpu", 2.0**16), GradScaler("cpu", 2.0**3)) == train(off, off)


def test_accumulation_penalty_and_clipping_as_without_scaling() -> None:
    def train(scaler: GradScaler) -> list[float]:
        param = weight(1.0, 2.0)
        optimizer = torch.optim.SGD([param], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            for factor in (1.0, 3.0):
                loss = (param.sin() * factor).sum()
                (grad,) = torch.autograd.grad(scaler.scale(loss), param, create_graph=True)
                grad = grad / scaler.get_scale()
                scaler.scale(loss + grad.pow(2).sum().sqrt()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([param], 0.25)
            scaler.step(optimizer)
            scaler.update()
        return param.tolist()

    assert train(GradScaler("cpu", 2.0**10)) == train(GradScaler("cpu", enabled=False))


# -- what tools outside do by hand ------------------------------------------------------------------------------------


def test_unscaling_by_hand_does_what_it_is_asked_to_and_is_not_taken_for_the_scalers() -> None:
    scaler, optimizer, param = ready()
    for _ in range(2):
        scaler._unscale_grads_(optimizer, torch.tensor(0.5), torch.tensor(0.0), True)
    assert param.grad.tolist() == [1.0, 1.0]
    param.grad.mul_(4.0)
    scaler._unscale_grads_(optimizer, torch.tensor(1.0), torch.tensor(0.0), True)
    scaler.step(optimizer)
    assert param.tolist() == [0.0, 1.0]


def test_a_scale_set_by_hand_scales() -> None:
    scaler = GradScaler("cpu")
    scaler._scale = torch.tensor(8.0)
    assert scaler.scale(torch.ones(())).item() == 8.0


def test_an_overridden_scale_reaches_a_fused_step() -> None:
    class Halved(GradScaler):
        def _get_scale_async(self) -> torch.Tensor | None:
            return None if self._scale is None else self._scale / 2

    scaler, param = Halved("cpu", init_scale=4.0), weight(9.0)
    scaler.scale(param.sum()).backward()
    scaler.step(torch.optim.SGD([param], lr=1.0, fused=True))
    assert param.item() == 7.0


class KeepsGradients(torch.optim.SGD):
    """A third-party fused optimizer, which does not write unscaled gradients back."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if not self.found_inf:
                param.data -= param.grad / self.grad_scale


def test_a_shared_gradient_that_a_foreign_optimizer_left_scaled_is_unscaled() -> None:
    scaler, shared = GradScaler("cpu", init_scale=4.0), weight(1.0)
    scaler.scale(shared.sum()).backward()
    scaler.step(KeepsGradients([shared], lr=1.0))
    scaler.step(torch.optim.SGD([shared], lr=1.0))
    assert shared.item() == -1.0


def test_a_second_loss_scaled_by_hand_counts_as_scaled() -> None:
    scaler, shared = GradScaler("cpu", init_scale=4.0), weight(1.0)
    one, two = torch.optim.SGD([shared], lr=1.0), torch.optim.SGD([shared], lr=1.0)
    scaler.scale(shared.sum()).backward()
    scaler.step(one)
    two.zero_grad(set_to_none=False)
    (shared.sum() * scaler.get_scale()).backward()
    scaler.step(two)
    assert shared.item() == -1.0


def test_asking_for_the_scale_changes_nothing() -> None:
    scaler, shared = GradScaler("cpu", init_scale=4.0), weight(1.0)
    one, two = torch.optim.SGD([shared], lr=1.0), torch.optim.SGD([shared], lr=1.0)
    scaler.scale(2.0 * shared.sum()).backward()
    scaler.unscale_(one)
    assert scaler.get_scale() == scaler.state_dict()["scale"] == 4.0
    torch.nn.utils.clip_grad_norm_([shared], 1.0)
    scaler.step(one)
    scaler.step(two)
    assert shared.item() == pytest.approx(-1.0, rel=1e-5)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("clip", [False, True])
def test_a_gradient_that_is_there_twice_is_unscaled_once(options: dict[str, bool], clip: bool) -> None:
    def twice(scaler: GradScaler) -> list[float]:
        listed, sharing, shared = weight(1.0), weight(1.0), weight(1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a parameter that is listed twice
            optimizer = torch.optim.SGD([listed, listed, sharing, shared], lr=1.0, **options)
        scaler.scale(listed.sum() + 2.0 * shared.sum()).backward()
        sharing.grad = shared.grad
        if clip:
            scaler.clip_grad_norm_(optimizer, 1e9)
        scaler.step(optimizer)
        return [listed.item(), sharing.item(), shared.item()]

    assert twice(GradScaler("cpu", init_scale=4.0)) == twice(GradScaler("cpu", enabled=False)) == [-1.0, -1.0, -1.0]


def test_a_shared_gradient_that_a_subclass_of_torchs_has_unscaled_is_not_unscaled_again() -> None:
    class Named(torch.optim.SGD):
        pass

    scaler, shared = GradScaler("cpu", init_scale=4.0), weight(1.0)
    scaler.scale(shared.sum()).backward()
    scaler.step(Named([shared], lr=1.0, fused=True))
    scaler.step(torch.optim.SGD([shared], lr=1.0))
    assert shared.item() == -1.0


@pytest.mark.parametrize("gradient", [torch.tensor(8.0).expand(64, 64), torch.full((64,), 8.0).expand(64, 64)])
def test_a_fused_step_is_given_gradients_that_it_can_write_to(gradient: torch.Tensor) -> None:
    scaler, param = GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.ones(64, 64))
    scaler.scale(torch.ones(()))
    param.grad = gradient
    scaler.step(torch.optim.SGD([param], lr=1.0, fused=True))
    assert torch.equal(param, torch.full((64, 64), -1.0))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_", "step"])
def test_lazily_negated_gradients_are_unscaled(fused: bool, call: str) -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, dtype=torch.float64))]
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    scaler.scale(torch.ones(()))
    params[0].grad = torch.full((2,), 8.0)
    params[1].grad = torch.complex(*torch.full((2, 2), 8.0, dtype=torch.float64)).conj().imag
    assert params[1].grad.is_neg()
    if call != "step":
        getattr(scaler, call)(optimizer, *([1e9] if call == "clip_grad_norm_" else []))
    scaler.step(optimizer)
    assert [param.tolist() for param in params] == [[-1.0, -1.0], [3.0, 3.0]]


def test_how_an_optimizer_wants_to_step_is_asked_at_every_step() -> None:
    scaler, param = GradScaler("cpu", init_scale=4.0), weight(1.0)
    optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
    for supports in (True, False, True):
        optimizer._step_supports_amp_scaling = supports
        optimizer.param_groups[0]["fused"] = supports
        param.grad = None
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert param.item() == -2.0


@pytest.mark.parametrize("unscale", [False, True])
def test_a_users_grad_scale_may_be_a_number(unscale: bool) -> None:
    scaler, param = GradScaler("cpu", init_scale=4.0), weight(1.0)
    optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
    optimizer.grad_scale = 2.0
    scaler.scale(8.0 * param.sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert param.item() == -3.0


def test_a_default_device_elsewhere_does_not_matter() -> None:
    for fused in (False, True):
        for clip in (False, True):
            scaler, param = GradScaler("cpu", init_scale=4.0), torch.nn.Parameter(torch.ones(5000))
            optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
            scaler.scale(param.sum()).backward()
            with torch.device("meta"):
                if clip:
                    assert scaler.clip_grad_norm_(optimizer, 1e9).device.type == "cpu"
                scaler.step(optimizer)
                scaler.update()
            assert param[0].item() == 0.0


def test_an_fp16_parameter_without_a_name_is_named_by_its_place() -> None:
    scaler, linear = GradScaler("cpu"), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(linear.named_parameters(), lr=1.0)
    late = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    late.grad = torch.ones_like(late)
    optimizer.param_groups[0]["params"].append(late)
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match=re.escape("param_groups[0]['params'][2] of shape (1,)")):
        scaler.unscale_(optimizer)


def test_gradients_made_in_inference_mode_are_unscaled() -> None:
    scaler, optimizer, param = ready()
    with torch.inference_mode():
        param.grad = torch.full((2,), 4.0)
        scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [0.0, 1.0]


def test_numbers_of_numpy_become_plain_ones_in_a_checkpoint() -> None:
    numpy = pytest.importorskip("numpy")
    scaler = GradScaler("cpu", numpy.float32(4.0), numpy.float64(3.0), numpy.float32(0.25), numpy.int64(7))
    assert saved(scaler).items() >= {**STATE, "scale": 4.0, "growth_interval": 7, "_growth_tracker": 0}.items()
    assert {type(number) for number in saved(scaler).values()} == {int, float}
    with pytest.raises(ValueError, match="init_scale must be a finite number > 0"):
        GradScaler("cpu", 10**400)


class Subclass(torch.Tensor):
    """A gradient whose type torch's native ops know and ours need not."""


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_of_a_subclass_that_unscaling_makes_infinite_skips_the_step(fused: bool) -> None:
    scaler, param = GradScaler("cpu", init_scale=2.0**-20), weight(1.0, 2.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((2,), 1e35).as_subclass(Subclass)
    scaler.step(torch.optim.SGD([param], lr=0.1, fused=fused))
    scaler.update()
    assert param.tolist() == [1.0, 2.0]
    assert scaler.get_scale() == 2.0**-21


# -- what ranks, hooks and copies are given ----------------------------------------------------------------------------


def test_ranks_begin_with_the_numbers_of_the_scaler_and_hear_of_those_that_are_set() -> None:
    scaler = GradScaler("cpu", schedule=Headroom(init_scale=4.0))
    rank = agreeing(scaler)
    trackers = tuple(scaler.schedule.trackers().values())
    assert trackers
    scaler.scale(torch.ones(()))
    scaler.update(8.0)
    saved = scaler.state_dict() | {"_growth_tracker": 3}
    scaler.load_state_dict(saved)
    assert rank.started[-2:] == [(4.0, 0, *trackers), (8.0, 3, *trackers)]
    assert rank.calls == [("update", 8.0)]


@pytest.mark.parametrize(("gradient", "known"), [(8.0, 2.0), (torch.inf, 0.0)])
def test_ranks_learn_the_largest_finite_gradient(gradient: float, known: float) -> None:
    scaler, param = GradScaler("cpu", schedule=Headroom(init_scale=4.0)), weight(1.0)
    rank = agreeing(scaler)
    scaler.scale(param.sum())
    param.grad = torch.tensor([gradient])
    scaler.step(torch.optim.SGD([param]))
    scaler.update()
    assert [norm.item() for norm in rank.norms] == [known]


def test_after_an_update_any_optimizer_has_an_entry() -> None:
    scaler, optimizer, _ = ready()
    scaler.step(optimizer)
    scaler.update()
    assert scaler._per_optimizer_states[id(object())]["stage"] is OptState.READY


def test_an_update_advances_no_schedule_of_which_the_host_does_not_know_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Flag, Readback):
        monkeypatch.setattr(kind, "is_on_host", property(lambda self: False))
    scaler, optimizer, param = ready(fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    epochs = []
    for _ in range(4):
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.step_scheduler(schedule)
        scaler.update()
        epochs.append(schedule.last_epoch)
    assert epochs == [0, 0, 1, 2]


def test_the_words_of_calls_at_the_wrong_time() -> None:
    scaler, optimizer, _ = ready()
    text = (
        "No inf checks were recorded prior to update. Call scaler.step(optimizer) or scaler.unscale_(optimizer) "
        "before each update()"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        scaler.update()
    scaler.step(optimizer)
    text = "To pickle or copy it now, call scaler.update() first"
    with pytest.raises(RuntimeError, match=f"{re.escape(text)}$"):
        copy.deepcopy(scaler)


def test_a_copy_of_a_scaler_that_is_off_has_its_scale_and_none_has_tensors() -> None:
    assert copy.deepcopy(GradScaler("cpu", init_scale=3.0, enabled=False))._init_scale == 3.0
    scaler = GradScaler("cpu", schedule=Headroom(init_scale=4.0))
    scaler.scale(torch.ones(()))
    assert not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(scaler.__getstate__()))


def test_numbers_beside_a_schedule_are_all_named() -> None:
    text = (
        "init_scale=8.0, growth_interval=3 cannot be combined with schedule=: use the arguments of Static(...) instead"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        GradScaler("cpu", init_scale=8.0, growth_interval=3, schedule=Static(4.0))


# -- what torch takes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, GradScaler])
def test_a_scale_of_the_largest_number_neither_overflows_nor_stops_the_training(cls: Any) -> None:
    scaler, param = (
        cls("cpu", init_scale=torch.finfo(torch.float32).max, growth_factor=16.0, growth_interval=1),
        weight(1.0),
    )
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(param.sum() * 0.5).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == torch.finfo(torch.float32).max
    assert param.item() == 0.5


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, GradScaler])
def test_a_device_may_be_anything_that_stands_for_one(cls: Any) -> None:
    scaler, param = cls(device=mock.Mock(), init_scale=4.0), weight(1.0)
    scaler.scale(param.sum()).backward()
    scaler.step(torch.optim.SGD([param], lr=1.0))
    scaler.update()
    assert param.item() == 0.0


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, GradScaler])
def test_a_growth_tracker_beyond_its_interval_goes_on_counting(cls: Any) -> None:
    scaler, param = cls("cpu"), weight(1.0)
    optimizer = torch.optim.SGD([param], lr=0.0)
    scaler.load_state_dict(STATE | {"_growth_tracker": 9})
    trackers = []
    for factor in (1.0, 1.0, torch.inf, 1.0):
        param.grad = None
        scaler.scale(param.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        trackers.append((scaler.get_scale(), scaler._get_growth_tracker()))
    assert trackers == [(8.0, 10), (8.0, 11), (2.0, 0), (2.0, 1)]


def test_a_backoff_that_would_end_at_a_scale_of_zero_is_refused_wherever_it_comes_from() -> None:
    text = "backoff_factor must be in [2**-149, 1), got 1e-300"
    with pytest.raises(ValueError, match=re.escape(text)):
        GradScaler("cpu", backoff_factor=1e-300)
    scaler = GradScaler("cpu")
    with pytest.raises(ValueError, match=re.escape(text)):
        scaler.load_state_dict(STATE | {"backoff_factor": 1e-300})
    with pytest.raises(ValueError, match=re.escape(text)):
        scaler.set_backoff_factor(1e-300)
    theirs = torch.amp.GradScaler("cpu", backoff_factor=1e-300)
    theirs.scale(param := weight(1.0)).sum().mul(torch.inf).backward()
    theirs.step(torch.optim.SGD([param]))
    theirs.update()
    assert theirs.get_scale() == 0.0


def test_a_repr_shows_the_settings_and_reads_nothing_from_the_device() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, allow_fp16_gradients=True)
    scaler.scale(torch.ones(1, requires_grad=True))
    scaler._scale = torch.empty((), device="meta")  # whose values cannot be read
    scaler.set_growth_interval(7)
    text = repr(scaler)
    assert text.startswith("GradScaler('cpu', schedule=Dynamic(init_scale=8.0, ")
    assert "growth_interval=7" in text
    assert text.endswith("), allow_fp16_gradients=True)")
    assert repr(GradScaler("cpu", enabled=False)) == "GradScaler('cpu', enabled=False)"
    assert "schedule=Static(init_scale=4.0" in repr(GradScaler("cpu", schedule=Static(4.0)))


def test_a_scaler_that_is_not_made_yet_or_has_strange_numbers_has_a_repr() -> None:
    assert "GradScaler object at" in repr(GradScaler.__new__(GradScaler))
    scaler = GradScaler("cpu")
    scaler._growth_factor = -1.0
    assert "growth_factor=2.0" in repr(scaler)


# -- states that tools read and write -------------------------------------------------------------------------------


class Written(torch.amp.GradScaler):
    """Unscales as tools do that were written for torch's class: by its dictionary."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("twice")
        inv_scale = torch.tensor(1.0 / self.get_scale())
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, inv_scale, torch.zeros(()), False)
        state["stage"] = OptState.UNSCALED


class OurWritten(GradScaler):
    unscale_ = Written.unscale_  # type: ignore[assignment]  # the same code


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("when", ["subclass", "before", "after", "whole", "update alone"])
def test_tools_write_states_of_optimizers_before_and_after_they_are_used(when: str, bad: bool) -> None:
    """Also for the optimizer of an id that the scaler has not seen yet."""
    results = []
    for cls in (Written, OurWritten) if when == "subclass" else (torch.amp.GradScaler, GradScaler):
        scaler, param = cls("cpu", init_scale=4.0), weight(1.0)
        optimizer = torch.optim.SGD([param], lr=0.5)
        scaler.scale(param.sum()).backward()
        if when == "subclass":
            assert param.grad is not None
            param.grad *= torch.inf if bad else 1.0
            scaler.unscale_(optimizer)
            with pytest.raises(RuntimeError, match="twice"):
                scaler.unscale_(optimizer)
        else:
            if when == "after":
                scaler.unscale_(optimizer)
            found = {torch.device("cpu"): torch.tensor(float(bad))}
            if when == "whole":
                scaler._per_optimizer_states[id(optimizer)] = {
                    "stage": OptState.UNSCALED,
                    "found_inf_per_device": found,
                }
            else:
                state = scaler._per_optimizer_states[id(optimizer)]
                state["stage"], state["found_inf_per_device"] = OptState.UNSCALED, found
            state = scaler._per_optimizer_states[id(optimizer)]
            assert (state.get("stage"), dict(state)["found_inf_per_device"]) == (OptState.UNSCALED, found)
            assert [*state] == [*state.keys()] == ["stage", "found_inf_per_device"]
            assert state.get("else", 3) == 3
        with pytest.raises(AssertionError):
            copy.deepcopy(scaler)
        if when != "update alone":
            scaler.step(optimizer)
        scaler.update()
        assert not scaler._per_optimizer_states
        results.append((param.item(), scaler.get_scale()))
    assert results[0] == results[1]
    assert results[0][1] == (2.0 if bad else 4.0)


class Copied(torch.amp.GradScaler):
    """Has a step of its own, which goes through the same states as torch's."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        returned = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return returned


class OurCopied(GradScaler):
    step = Copied.step


@pytest.mark.parametrize("bad", [False, True])
def test_a_step_of_a_tool_gives_back_the_state_that_it_was_given(bad: bool) -> None:
    results = []
    for cls in (Copied, OurCopied):
        scaler, param = cls("cpu", init_scale=4.0), weight(1.0)
        optimizer = torch.optim.SGD([param], lr=0.5)
        scaler.scale(param.sum() * (torch.inf if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append((param.item(), scaler.get_scale()))
    assert results[0] == results[1]


@dataclasses.dataclass
class ComparedByValue:
    """Has no hash, because it has an `__eq__`."""

    inner: torch.optim.Optimizer

    def step(self) -> None:
        self.inner.step()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups


class WithSlots:
    """Cannot be referenced weakly."""

    __slots__ = ("inner",)
    __init__, step, param_groups = ComparedByValue.__init__, ComparedByValue.step, ComparedByValue.param_groups


@pytest.mark.parametrize("kind", [ComparedByValue, WithSlots])
def test_optimizers_without_a_hash_or_a_weak_reference_train_as_with_torch(kind: Any) -> None:
    results = []
    for cls in (torch.amp.GradScaler, GradScaler):
        scaler, param = cls("cpu", init_scale=4.0), weight(1.0)
        optimizer = kind(torch.optim.SGD([param], lr=0.5))
        for factor in (1.0, torch.inf, 2.0):
            param.grad = None
            scaler.scale(param.sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append((param.item(), scaler.get_scale()))
    assert results[0] == results[1] == (-0.5, 2.0)


@pytest.mark.parametrize("given", [None, [1], 3])
def test_what_is_no_optimizer_is_named(given: Any) -> None:
    scaler, _, _ = ready()
    with pytest.raises(TypeError, match=f"expected an optimizer with param_groups, got {type(given).__name__}"):
        scaler.step(given)


@pytest.mark.parametrize("call", ["step", "unscale_"])
def test_a_parameter_that_is_no_tensor_is_torchs_assertion(call: str) -> None:
    scaler, _, _ = ready()
    groups: Any = types.SimpleNamespace(param_groups=[{"params": [3]}], step=lambda: None)
    with pytest.raises(AssertionError, match=r"^expected param to be torch\.Tensor, got int: ") as caught:
        getattr(scaler, call)(groups)
    assert isinstance(caught.value, TypeError)


def _write_stage(scaler: Any, key: int, stage: OptState) -> None:
    scaler._per_optimizer_states[key]["stage"] = stage


def _put_back(scaler: Any, key: int) -> None:
    states = scaler._per_optimizer_states
    state = states.pop(key)
    states[key] = state


def _save_and_restore(scaler: Any, key: int) -> None:
    states = scaler._per_optimizer_states
    saved = dict(states)
    states.clear()
    states.update(saved)


def _add_in_place(scaler: Any, key: int) -> None:
    scaler._per_optimizer_states |= {key: dict(STEPPED)}


FOUND = {torch.device("cpu"): torch.tensor(1.0)}
FINITE = {torch.device("cpu"): torch.tensor(0.0)}
STEPPED = {"stage": OptState.STEPPED, "found_inf_per_device": FOUND}
WAYS_TO_WRITE: dict[str, Callable[[Any, int], object]] = {
    "one entry": lambda scaler, key: _write_stage(scaler, key, OptState.READY),
    "several entries": lambda scaler, key: scaler._per_optimizer_states[key].update(STEPPED),
    "a state by update": lambda scaler, key: scaler._per_optimizer_states.update({key: dict(STEPPED)}),
    "a default": lambda scaler, key: scaler._per_optimizer_states.setdefault(key, dict(STEPPED)),
    "deleted": lambda scaler, key: scaler._per_optimizer_states.__delitem__(key),
    "popped": lambda scaler, key: scaler._per_optimizer_states.pop(key),
    "cleared": lambda scaler, key: scaler._per_optimizer_states.clear(),
    "popped and put back": _put_back,
    "saved and restored": _save_and_restore,
    "added in place": _add_in_place,
    "all new": lambda scaler, key: setattr(scaler, "_per_optimizer_states", {key: dict(STEPPED)}),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["one optimizer", "another with the same parameter"])
@pytest.mark.parametrize("way", WAYS_TO_WRITE)
def test_after_every_way_to_write_a_state_all_goes_on_as_with_torch(way: str, is_first: bool) -> None:
    """Gradients that are put back and declared scaled are unscaled again, which they were not."""
    results = []
    for cls in (torch.amp.GradScaler, GradScaler):
        scaler, param = cls("cpu", init_scale=4.0), weight(1.0)
        optimizer = torch.optim.SGD([param], lr=0.5)
        others = [] if is_first else [torch.optim.SGD([param], lr=0.0)]
        scaler.scale(param.sum()).backward()
        state = scaler._per_optimizer_states[id(optimizer)]
        assert param.grad is not None
        put_back = param.grad.clone()
        scaler.unscale_(optimizer)
        assert (state["stage"], *state["found_inf_per_device"].values()) == (OptState.UNSCALED, torch.tensor(0.0))
        param.grad.copy_(put_back)
        WAYS_TO_WRITE[way](scaler, id(optimizer))
        listed = {key: dict(value) for key, value in scaler._per_optimizer_states.items()}
        try:
            for each in (optimizer, *others):
                scaler.step(each)
            refused = None
        except RuntimeError as error:
            refused = str(error)[:30]
        grads = None if others else param.grad.item()  # torch unscales a shared gradient twice
        results.append((listed.get(id(optimizer)), refused, grads, param.item()))
    assert results[0] == results[1]


def test_a_gradient_of_two_optimizers_is_unscaled_once_also_if_a_state_is_put_back() -> None:
    scaler, param = GradScaler("cpu", init_scale=4.0), weight(1.0)
    first, second = (torch.optim.SGD([param], lr=0.0) for _ in range(2))
    scaler.scale(param.sum()).backward()
    scaler.unscale_(first)
    states = scaler._per_optimizer_states
    states[id(first)] = states.pop(id(first))
    scaler.step(second)
    assert param.grad is not None
    assert param.grad.item() == 1.0


def test_states_that_a_tool_keeps_show_what_was_done_since() -> None:
    seen = []
    for cls in (torch.amp.GradScaler, GradScaler):
        scaler, param = cls("cpu", init_scale=4.0), weight(1.0)
        optimizer = torch.optim.SGD([param], lr=0.5)
        scaler.scale(param.sum()).backward()
        states = scaler._per_optimizer_states
        before = bool(states), len(states), list(states), states == {}, states != {}
        scaler.unscale_(optimizer)
        state, expected = states.get(id(optimizer)), {"stage": OptState.UNSCALED, "found_inf_per_device": FINITE}
        assert state == expected == state.copy() == state | {} == pickle.loads(pickle.dumps(state))
        assert states == {id(optimizer): expected} == pickle.loads(pickle.dumps(dict(states)))
        assert states != {}
        found = id(optimizer) in states, bool(states), len(states), list(states) == [id(optimizer)]
        listed = [(key == id(optimizer), value["stage"]) for key, value in states.items()]
        scaler.step(optimizer)
        seen.append((before, found, listed, states[id(optimizer)]["stage"]))
        scaler.update()
        assert not scaler._per_optimizer_states
    assert seen[0] == seen[1]


def test_to_read_a_state_begins_no_iteration() -> None:
    scaler = GradScaler("cpu")
    assert scaler._per_optimizer_states[0]["stage"] is OptState.READY
    copy.deepcopy(scaler)
    states = scaler._per_optimizer_states
    fresh = type(states)(states.default_factory, {1: 2})
    fresh[3] = 4
    assert fresh == {1: 2, 3: 4}
    assert fresh[5]["stage"] is OptState.READY
