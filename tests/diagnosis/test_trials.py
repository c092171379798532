"""A remedy is tried on the batch before it is suggested, and samples at fault are named."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import castwise
from castwise.diagnosis import Diagnosis, _remedies, _trials, diagnose
from castwise.diagnosis._loaded_batches import LOADED_BATCHES
from castwise.diagnosis._recording import Recording


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def between(function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Calls(function), nn.Linear(4, 2))


def in_fp16(model: nn.Module, x: Tensor) -> Diagnosis:
    with castwise.autocast("cpu", dtype=torch.float16):
        return diagnose(model, lambda y: y.float().mean(), x)


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def test_a_module_in_fp32_that_helps_is_suggested_as_tried() -> None:
    found = in_fp16(between(lambda x: (x * 300 * 300).float() * 1e-6), X)
    assert (found.module, found.remedy, found.tried) == ("1", "float32", "finite")
    assert str(found).endswith("\ntried on this batch: finite")


def test_a_module_in_fp32_that_is_not_enough_is_suggested_with_the_others() -> None:
    model = between(lambda x: x * 300 * 300)  # and the next module casts its result to fp16
    found = in_fp16(model, X)
    assert (found.module, found.remedy, found.tried) == ("1", "float32", "finite")
    assert found.advice.startswith("keep 1 and 2 in fp32: castwise.autocast(")
    policy = castwise.Policy(compute="float16", modules={"1": "float32", "2": "float32"}).bind(model)
    assert 'modules={"1": "float32", "2": "float32"}' in found.code
    with castwise.autocast("cpu", policy=policy):
        assert not diagnose(model, lambda y: y.float().mean(), X)


def test_where_many_modules_overflow_all_of_the_model_is_suggested() -> None:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(6)]
    for layer in layers:
        nn.init.constant_(layer.weight, 16.0)
    model = nn.Sequential(Calls(lambda x: x * 6e4), *layers)
    found = in_fp16(model, X.abs() + 1)
    assert found.advice == "run all of the model in fp32: 1 in fp32 is not enough, as other modules overflow too"
    region = 'with torch.autocast("cpu", enabled=False):'
    assert (found.code, found.tried) == (f"# instead of the line of the autocast region:\n{region}", "finite")


@pytest.mark.parametrize("by_fsdp", [False, True])
def test_weights_in_fp16_are_tried_in_fp32_because_no_policy_widens_them(
    monkeypatch: pytest.MonkeyPatch, by_fsdp: bool
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16) if by_fsdp else None
    for module in (_remedies, _trials):
        monkeypatch.setattr(module, "fsdp_mixed_precision", lambda module: policy)
    model = nn.Sequential(between(lambda x: x * 300 * 300), nn.BatchNorm1d(2)).half()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = diagnose(model, lambda y: y.float().square().mean(), X.half())
    assert (found.module, found.remedy) == ("0.1", "float32")
    assert found.tried == ("untried: FSDP2 casts the inputs of each of its units" if by_fsdp else "finite")
    assert ("MixedPrecisionPolicy(param_dtype=torch.float32)" if by_fsdp else "model.float()") in found.advice
    after = model.state_dict()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype is tensor.dtype for name, tensor in before.items()
    )


def test_in_a_region_weights_in_fp16_leave_the_policy_untried() -> None:
    model = between(lambda x: x * 300 * 300)
    model[2].half()  # type: ignore[operator]
    found = in_fp16(model, X)
    assert (found.module, found.remedy) == ("1", "float32")
    assert found.advice.startswith("keep 1 in fp32: castwise.autocast(")
    assert found.tried == "untried: some weights are in other formats than fp32"


def test_where_no_format_helps_the_sample_is_named() -> None:
    x = X.clone()
    x[5] *= 1e20
    found = in_fp16(between(lambda x: x.square() * 1e-3), x)
    assert found.remedy == ""
    assert found.advice.startswith("no format helps: with all of the model in fp32 the batch is not finite either.")
    assert (found.samples, found.tried) == ((5,), "finite without sample 5")
    assert "\n  sample 5 of the batch\n" in str(found)


def test_samples_of_a_fault_in_an_op_are_found_by_halving_the_batch() -> None:
    x = X.clone()
    x[[2, 6]] = 0
    calls: list[int] = []
    model = nn.Sequential(Calls(lambda x: (calls.append(len(x)), x / x.norm(dim=-1, keepdim=True))[1]), nn.Linear(4, 1))  # type: ignore[func-returns-value]
    found = diagnose(model, torch.mean, x)
    assert (found.samples, found.tried) == ((2, 6), "finite without 2 samples")
    assert calls == [8, 4, 2, 2, 1, 1, 4, 2, 2, 1, 1, 6]
    for size in (2, 8):
        assert "\n  sample" not in str(diagnose(model, torch.mean, torch.zeros(size, 4)))


def test_an_input_that_is_not_finite_is_named_with_its_column() -> None:
    x = X.clone()
    x[3, 2] = -torch.inf
    found = diagnose(nn.Linear(4, 1), torch.mean, x)
    assert found.sample == "sample 3 of the batch, column 2: -inf"
    assert (found.tried, found.samples) == ("finite without sample 3", (3,))


def test_a_row_of_a_weight_is_tried_without_it_and_put_back() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), Calls(lambda x: x * 1e3))
    with torch.no_grad():
        model[0].weight[7] = 3e38
    version, before = model[0].weight._version, model[0].weight.clone()
    found = diagnose(model, torch.mean, torch.arange(10))
    assert (found.remedy, found.tried) == ("weight", "finite with zeros in this row")
    assert found.advice.startswith("0.weight[7] has the magnitude 3e+38")
    assert torch.equal(model[0].weight, before)
    assert model[0].weight._version == version


def test_trials_change_nothing() -> None:
    torch.manual_seed(0)  # a small random number would not overflow

    def function(x: Tensor) -> Tensor:
        return x.mul_(torch.rand(())) * 300 * 300  # writes to its input, and draws a number

    model = nn.Sequential(Calls(function), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4), Calls(lambda x: x * 1e38))
    model[3].weight.grad = torch.ones(4, 4)
    x = X.half().clone()
    before = copy.deepcopy(model.state_dict()), x.clone(), torch.get_rng_state(), model[3].weight.grad
    found = in_fp16(model, x)
    assert found.advice.startswith("no format helps")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[0][name]), name
    assert torch.equal(x, before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert model[3].weight.grad is before[3]
    assert torch.equal(model[3].weight.grad, torch.ones(4, 4))


def test_a_mask_in_the_output_is_not_called_a_remedy_that_fails() -> None:
    mask = torch.zeros(8, 2).index_fill_(1, torch.tensor([1]), -torch.inf)
    model = nn.Sequential(between(lambda x: (x * 300 * 300).float() * 1e-6), Calls(lambda x: x + mask))
    recording = Recording(model)
    recording.attach()
    with castwise.autocast("cpu", dtype=torch.float16):
        loss = model(X)[:, 0].float().sum()
    loss.backward()
    found = recording.take().diagnose(1.0)
    recording.detach()
    assert found is not None
    assert (found.remedy, found.tried) == ("float32", "untried: the forward cannot be run so")


def test_an_output_far_larger_than_those_before_is_no_cure() -> None:
    model = between(lambda x: x)
    recording = Recording(model)
    recording.attach()
    for factor in (1.0, 1.0, 1e3):
        found = recording.take().diagnose(1.0)
        with torch.no_grad():
            model[0].weight *= factor
            model[2].weight *= factor
        with castwise.autocast("cpu", dtype=torch.float16):
            loss = model(X * 1e2).float().square().mean()
        loss.backward()
    found = recording.take().diagnose(1.0)
    recording.detach()
    assert found is not None
    assert found.advice.startswith("a wider format is no cure: in fp32 the output is finite and 1e+06 times as large")
    assert (found.remedy, found.code) == ("learning rate", "")


PARTS = [4, 4, 2, 1, 1, 2, 7]


@pytest.mark.parametrize(
    ("function", "calls", "results"),
    [
        (
            lambda x: x * 300 * 300,
            [[8] * 4, [8]],
            ["finite", "untried on this batch: finite on the first one with this fault"],
        ),
        # No format helps, so the samples of each batch are halved.
        (lambda x: x.square() * 1e-3, [[8] * 4 + PARTS, [8, *PARTS]], ["finite without sample 5"] * 2),
    ],
    ids=["a format helps", "no format helps"],
)
def test_formats_are_tried_once_for_each_fault_of_a_run(
    function: Any, calls: list[list[int]], results: list[str]
) -> None:
    forwards: list[int] = []
    model = between(lambda x: (forwards.append(len(x)), function(x))[1])  # type: ignore[func-returns-value]
    recording, x = Recording(model), X.clone()
    x[5] *= 1e20 if "sample" in results[0] else 1
    recording.attach()
    tried, counted = [], []
    for _ in results:
        with castwise.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().mean()
        loss.backward()
        forwards.clear()
        found = recording.take().diagnose(1.0)
        assert found is not None
        tried.append(found.tried)
        counted.append([*forwards])
    recording.detach()
    assert tried == results
    assert counted == calls


def test_what_is_not_tried_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trials, "SECONDS", -1.0)
    found = in_fp16(between(lambda x: x * 300 * 300), X)
    assert (found.remedy, found.tried) == ("float32", why := "untried: time ran out")
    assert found.advice.startswith("keep 1 in fp32")
    assert str(found).endswith(f"\n{why}")


@pytest.mark.usefixtures("group")
def test_a_rank_tries_alone_what_has_no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    def averaged(x: Tensor) -> Tensor:
        torch.distributed.all_reduce(x.detach().clone())
        return x * 300 * 300

    monkeypatch.setattr(_trials, "has_several_ranks", lambda: True)
    assert in_fp16(between(lambda x: x * 300 * 300), X).tried == "finite"
    why = "untried: the forward exchanges tensors with other ranks"
    assert in_fp16(between(averaged), X).tried == why
    x = X.clone()
    x[5] = torch.nan
    found = in_fp16(between(averaged), x)
    assert (found.tried, found.samples) == (why, (5,))


def test_a_lower_scale_was_tried_by_the_replay() -> None:
    scaler = castwise.GradScaler("cpu", init_scale=2.0**20)
    model = between(lambda x: x * 100)
    with castwise.autocast("cpu", dtype=torch.float16):
        found = diagnose(model, lambda y: y.sum(), X, scaler)
    assert (found.remedy, found.tried) == ("scale", "finite at scale 1")


# -- indices in a dataset ------------------------------------------------------------------------------------------


@pytest.fixture
def recorded() -> Iterator[Callable[[Any], Diagnosis | None]]:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    recording = Recording(model)
    recording.attach()

    def first_fault(batches: Any) -> Diagnosis | None:
        for x in batches:
            model(x).sum().backward()
            found = recording.take().diagnose(1.0)
            optimizer.zero_grad()
            optimizer.step()
            if found:
                return found
        return None

    yield first_fault
    recording.detach()


def with_inf_at(index: int, count: int = 64) -> Tensor:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    x[index, 2] = torch.inf
    return x


def alone(batches: Any) -> Iterator[Tensor]:
    for (x,) in batches:
        yield x


@pytest.mark.parametrize("workers", [0, 2])
def test_the_index_in_the_dataset_is_known_if_batches_are_shuffled(recorded: Any, workers: int) -> None:
    data = TensorDataset(with_inf_at(37))
    loader = DataLoader(data, 8, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    next(iter(loader))  # an epoch that is left early
    found = recorded(alone(loader))
    assert found.dataset_indices == (37,)
    assert found.sample == f"sample {found.samples[0]} of the batch, dataset[37], column 2: inf"


def test_the_index_is_known_in_micro_batches_and_of_casts_and_views(recorded: Any) -> None:
    loader = DataLoader(TensorDataset(with_inf_at(22).double().reshape(64, 2, 2)), 16, shuffle=True)
    found = recorded(part.float().flatten(1) for x in alone(loader) for part in x.flip(0).split(3))
    assert found.dataset_indices == (22,)


class Streamed(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Tensor]:
        yield from with_inf_at(9)


class ByName(Dataset):  # type: ignore[type-arg]
    def __getitem__(self, name: str) -> Tensor:
        return with_inf_at(1, 2)[int(name == "bad")]


def dropping(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([x for (x,) in samples[1:]])


def test_only_the_position_is_told_where_the_index_is_not_known(recorded: Any) -> None:
    data = TensorDataset(with_inf_at(9))
    for batches in (
        DataLoader(Streamed(), 8),
        alone(DataLoader(data, 8, num_workers=1, in_order=False)),
        DataLoader(data, 8, collate_fn=dropping),
        (x + 1 for x in alone(DataLoader(data, 8))),
    ):
        found = recorded(batches)
        assert found.samples
        assert found.dataset_indices == ()
        assert found.sample == f"sample {found.samples[0]} of the batch, column 2: inf"


def test_samplers_may_draw_names(recorded: Any) -> None:
    found = recorded(DataLoader(ByName(), 2, sampler=["good", "bad", "good"]))
    assert found.sample == "sample 1 of the batch, dataset['bad'], column 2: inf"


def test_loaders_have_torchs_methods_afterwards() -> None:
    before = DataLoader.__iter__
    LOADED_BATCHES.follow()
    assert DataLoader.__iter__ is not before
    LOADED_BATCHES.leave()
    assert DataLoader.__iter__ is before
