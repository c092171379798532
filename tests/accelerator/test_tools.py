"""Policies, caches, recipes, diagnosis, comparison, tuning and monitoring on an accelerator."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator.availability import DEVICE, IS_SIMULATED, simulated
from tests.accelerator.training import KINDS, Counted, Training, batches, bits, castwise_command, net
from torch import nn

import castwise
from castwise import Policy, WeightCache, policies
from castwise._invariants.weights_of_steps import WeightsOfSteps
from castwise._recipes.quantized_linear import linear
from castwise._recipes.recipe import RECIPES
from castwise.monitor import _exponents as exponents
from castwise.monitor import _updates as updates
from castwise.monitor._exponents import count, tally


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


# -- policies, caches, recipes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "bf16_stable", "fp16", "fp16_stable"])
def test_a_policy_computes_what_torchs_region_computes_without_waits(name: str) -> None:
    policy, model, batch = getattr(policies, name), net().to(DEVICE), batches(1)[0]
    bound = policy.bind(model)
    with Counted() as counted, castwise.autocast(DEVICE, policy=bound):
        out = model(batch)
    assert counted.waits == {}
    dtype = torch.float16 if "fp16" in name else torch.bfloat16
    with torch.autocast(DEVICE, dtype=dtype):
        assert bits([model(batch)]) == bits([out]) or name.endswith("stable")


def dtypes_of_outputs(policy: Policy, device: str) -> list[torch.dtype]:
    model, dtypes = net().to(device), list[torch.dtype]()
    for module in model:
        module.register_forward_hook(lambda *args: dtypes.append(args[2].dtype))
    with castwise.autocast(device, policy=policy.bind(model)):
        model(batches(1, device)[0]).float().sum().backward()
    return dtypes[:3]


def test_rules_for_modules_and_ops() -> None:
    fields: dict[str, Any] = {"modules": {"0": "float16"}, "ops": {"layer_norm": "bfloat16", "gelu": "float32"}}
    policy, expected = Policy(compute="bfloat16", **fields), [torch.float16, torch.bfloat16, torch.float32]
    assert dtypes_of_outputs(policy, DEVICE) == dtypes_of_outputs(policy, "cpu") == expected


@pytest.mark.parametrize("verify", [False, "rolling"])
def test_a_weight_cache_casts_once_in_inference_and_is_not_waited_for(verify: bool | str) -> None:
    model, batch = net().to(DEVICE).requires_grad_(False), batches(1)[0]
    cache, outputs = WeightCache(model, verify=verify), []
    for _ in range(3):
        with Counted() as counted, torch.inference_mode(), castwise.autocast(DEVICE, torch.float16, weight_cache=cache):
            outputs.append(model(batch))
    with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.float16):
        outputs.append(model(batch))
    assert len({str(bits([out])) for out in outputs}) == 1
    assert counted.waits == {}
    assert cache.report().hits > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_cache_in_training_never_serves_a_stale_cast(kind: str) -> None:
    results = []
    for uses_cache in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(1024, 512).to(DEVICE)  # smaller weights are not cached in training
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **KINDS[kind])
        cache = WeightCache(model) if uses_cache else None
        for batch in torch.randn(3, 2, 1024).to(DEVICE):
            optimizer.zero_grad()
            for _ in range(2):
                with castwise.autocast(DEVICE, torch.float16, weight_cache=cache):
                    loss = model(batch).square().mean()
                loss.backward()
            optimizer.step()
        assert cache is None or cache.report().refreshes == 6  # two tensors in three steps of two forwards
        results.append(bits(model.parameters()))
    assert results[0] == results[1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_compute_what_a_cpu_computes_without_waits(recipe: str) -> None:
    results = []
    for device in (DEVICE, "cpu"):
        torch.manual_seed(0)
        layer = nn.Linear(128, 128).to(device)
        x = torch.randn(128, 128).to(device).requires_grad_()
        with Counted() as counted:
            out = linear(x, layer.weight, layer.bias, RECIPES[recipe], False)
            out.backward(torch.ones_like(out))
        assert counted.waits == {}, counted.lines
        results.append(bits([out, x.grad, layer.weight.grad]))
    assert results[0] == results[1] or not IS_SIMULATED or "stochastic" in str(RECIPES[recipe])


# -- trace, diagnose, compare, tune -----------------------------------------------------------------------------------


def test_a_trace_names_the_dtypes() -> None:
    trace = castwise.trace(net().to(DEVICE), batches(1)[0], policy=policies.bf16)
    assert "bfloat16" in str(trace) or "bf16" in str(trace)
    assert len(trace.casts) > 0


def test_a_diagnosis_finds_what_a_cpu_finds() -> None:
    texts = []
    for device in (DEVICE, "cpu"):
        model = net().to(device)
        with torch.no_grad():
            model[3].weight[0, 0] = 1e30
        scaler = castwise.GradScaler(device, init_scale=2.0**10)
        (batch,) = batches(1, device)
        with castwise.autocast(device, dtype=torch.float16):
            texts.append(str(castwise.diagnose(model, lambda out: out.float().square().mean(), batch, scaler)))
    ours, cpus = (text.partition("loss 0.0")[0] for text in texts)  # losses differ: other autocast lists
    assert ours == cpus if IS_SIMULATED else ours.splitlines()[0] == cpus.splitlines()[0]


def test_a_comparison_of_policies_restores_the_model() -> None:
    model = net().to(DEVICE)
    before = bits(model.parameters())
    drift = castwise.compare(model, batches(2), {"bf16": policies.bf16}, forward=loss_of)
    assert bits(model.parameters()) == before
    assert "bf16" in str(drift)


def test_tuning_ends_with_a_policy() -> None:
    tuned = castwise.tune(net().to(DEVICE), batches(2), forward=loss_of, tolerance=0.5)
    assert isinstance(tuned.policy, Policy)


# -- monitoring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_exponents_are_those_that_a_cpu_counts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = (torch.randn(300, 200) * torch.exp2(torch.randint(-140, 120, (300, 200)).float())).to(dtype)
    with Counted() as counted:
        here = count(values.to(DEVICE, non_blocking=True))
    assert counted.waits == {}
    assert tally(here.cpu()) == tally(count(values))


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("piece", [2**22, 1000])
def test_tensors_that_are_counted_together_are_counted_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, piece: int, is_deterministic: bool
) -> None:
    monkeypatch.setattr(exponents, "_PIECE_ON_ACCELERATORS", piece)
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
    tensors = [torch.randn(shape).to(dtype) for dtype in dtypes for shape in ((70, 50), (), (0,), (7,))]
    tensors[0][:5] = 0.0
    tensors[0][6, 7], tensors[0][8] = math.inf, 1e-42
    tensors.append(torch.randn(40, 30)[:, ::2])
    counter = exponents.Counter(with_squares=True)
    torch.use_deterministic_algorithms(is_deterministic)
    for tensor in tensors:
        here = tensor.to(DEVICE)
        counter.add(here)
        if here.numel():
            here.zero_()  # as an op in place that follows
    results = counter.results()
    torch.use_deterministic_algorithms(False)
    for tensor, (counts, squares) in zip(tensors, results, strict=True):
        assert tally(counts.cpu()) == tally(count(tensor))
        assert squares is not None
        torch.testing.assert_close(squares.cpu(), exponents.sum_of_squares(tensor))


@pytest.mark.parametrize("piece", [2**22, 500])
def test_updates_that_are_compared_together_are_compared_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(exponents, "_PIECE_ON_ACCELERATORS", piece)
    torch.manual_seed(0)
    pairs = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for shape in ((20, 30), (5,), (0,), (100,)):
            old = torch.randn(shape).to(dtype)
            pairs.append((old, old + 1e-3 * torch.randn(shape).to(dtype)))
    together = updates.compare_together([(old.to(DEVICE), new.to(DEVICE)) for old, new in pairs])
    for (old, new), found in zip(pairs, together, strict=True):
        torch.testing.assert_close(found.cpu(), updates.compare(old, new), equal_nan=True)


@simulated
def test_a_sampled_step_launches_at_most_six_kernels_a_tensor() -> None:
    def launches(every: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(24))).to(DEVICE)
        optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), castwise.GradScaler(DEVICE)
        castwise.Monitor(model, optimizer, scaler, every=every, sinks=[lambda record: None]).attach()
        for _ in range(6):
            optimizer.zero_grad()
            with Counted() as counted:
                scaler.scale(model(torch.ones(4, 8, device=DEVICE)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        return counted.launches

    assert launches(1) - launches(1000) <= 6 * 48


def monitored(device: str, kind: str = "fused") -> tuple[list[dict[str, Any]], Counted]:
    """Return the records of eight steps, every one sampled, and the counts of the sixth."""
    training, records = Training(castwise, kind, "clip_grad_norm_", device, low=False), list[dict[str, Any]]()
    monitor = castwise.Monitor(training.model, training.optimizer, training.scaler, every=1, sinks=[records.append])
    monitor.attach()
    counts = Counted()
    for index, batch in enumerate(batches(8, device, (2,))):
        if index == 5:
            with counts:
                training.step(batch)
        else:
            training.step(batch)
    monitor.detach()
    return records, counts


def assert_close(mine: Any, other: Any) -> None:
    """Compare nested records; numbers may differ by the order of sums."""
    if isinstance(mine, dict):
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            assert_close(value, other[key])
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(other)
        for value, of_other in zip(mine, other, strict=True):
            assert_close(value, of_other)
    elif isinstance(mine, float):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6, nan_ok=True)
    else:
        assert mine == other


@simulated
def test_records_are_those_of_a_cpu() -> None:
    ours, cpus = (monitored(device)[0] for device in (DEVICE, "cpu"))
    assert [record["kind"] for record in ours] == [record["kind"] for record in cpus]
    for mine, other in zip(ours, cpus, strict=True):
        if mine["kind"] == "sample":
            assert_close(mine, other)


def test_a_sampled_step_waits_for_nothing_newer_than_two_updates() -> None:
    _, counted = monitored(DEVICE)
    assert set(counted.waits) <= {"event"}, counted.lines


def test_steps_whose_weights_are_kept_wait_for_nothing_newer_than_two_updates() -> None:
    model = net().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = batches(40)

    def train(first: int, last: int) -> None:
        for batch in data[first:last]:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    with castwise.Monitor(model, optimizer, every=1000, on_nonfinite="diagnose", snapshots=True):
        train(0, 16)
        with Counted() as counted:
            train(16, 40)  # weights are kept before steps 17 and 33
    assert set(counted.waits) <= {"event"}, counted.lines


def test_a_spike_is_replayed_and_the_steps_before_wait_for_nothing_newer_than_two_updates() -> None:
    model, records = net().to(DEVICE), list[dict[str, Any]]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = batches(60)

    def train(first: int, last: int, factor: float = 1.0) -> None:
        for batch in data[first:last]:
            optimizer.zero_grad()
            (loss_of(model, batch) * factor).backward()
            optimizer.step()

    monitor = castwise.Monitor(model, optimizer, every=1000, sinks=[records.append], spikes=True)
    with warnings.catch_warnings(), monitor:
        warnings.simplefilter("ignore", RuntimeWarning)
        train(0, 16)
        with Counted() as counted:
            train(16, 20)  # batches are kept at steps 17, 25, 33, 41 and 49
            model[0].weight.data.view(-1)[5] *= -1.0
            train(20, 50)
        assert set(counted.waits) <= {"event"}, counted.lines
        train(50, 51, 1000.0)
        train(51, 59)
        model[0].bias.data.mul_(1.5)
        train(59, 60)
    written = [record["text"] for record in records if record.get("name") == "written-weights"]
    size = model[0].bias.numel()
    assert written[0].startswith("bit 31 of element 5 of 0.weight was flipped between steps 20 and 21: ")
    assert written[1:] == [
        f"0.bias was written outside the optimizer between steps 59 and 60 in {size} of {size} elements."
    ]
    (spike,) = [record for record in records if record.get("name") == "loss-spike" and record["severity"] == "warning"]
    assert "at step 51" in spike["text"]
    assert (
        "Cause: batch. The loss was back one step later. Replayed: the batch at the weights of step " in spike["text"]
    )


def test_digests_of_weights_before_each_step_wait_for_nothing_and_are_those_of_a_cpu() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(90, 100), torch.randn(7), torch.randn(91, 101).bfloat16(), torch.empty(0)]
    on_cpu, of_steps = WeightsOfSteps(), WeightsOfSteps()
    on_device = [weight.to(DEVICE) for weight in weights]
    of_steps.note(1, on_device)
    with Counted() as counted:
        of_steps.note(2, on_device)
        of_steps.send()
    assert counted.waits == {}, counted.lines
    of_steps.receive()
    on_cpu.note(2, weights)
    on_cpu.send()
    on_cpu.receive()
    assert of_steps.before(1) == of_steps.before(2) == on_cpu.before(2)
    assert len(set(on_cpu.before(2))) == 4


def test_watching_changes_no_bit() -> None:
    plain, watched = (Training(castwise, "fused", "clip_grad_norm_") for _ in range(2))
    monitor = castwise.Monitor(
        watched.model, watched.optimizer, watched.scaler, every=1, on_nonfinite="diagnose"
    ).attach()
    data = batches(8, spoilt=(2, 6))
    assert watched.run(data) == plain.run(data)
    monitor.detach()


def test_a_skip_is_diagnosed() -> None:
    training, facts = Training(castwise, "fused"), list[dict[str, Any]]()
    monitor = castwise.Monitor(
        training.model, training.optimizer, training.scaler, sinks=[facts.append], on_nonfinite="diagnose"
    ).attach()
    training.run(batches(6, spoilt=(2,)))
    monitor.detach()
    assert any("skip" in record["kind"] or record.get("skipped") for record in facts)
    assert "input" in json.dumps(facts, default=str) or "batch" in json.dumps(facts, default=str)


# -- commands ---------------------------------------------------------------------------------------------------------


BF16 = """
import torch
from tests.accelerator.training import DEVICE
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
first, last = torch.nn.Linear(8, 16, bias=False).to(DEVICE), torch.nn.Linear(16, 4).to(DEVICE)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden / hidden.norm(dim=-1, keepdim=True))


model = Net()
optimizer = torch.optim.AdamW(model.parameters())
inputs = torch.randn(48, 8)
inputs[37] = 0.0
for (x,) in DataLoader(TensorDataset(inputs), batch_size=4):
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = model(x.to(DEVICE)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(torch.stack([param.isfinite().all() for param in model.parameters()]).all().item())
"""


@pytest.mark.parametrize("option", ["--guard", "--snapshots", None])
def test_without_a_scaler_two_options_name_line_and_sample_and_a_run_without_them_the_step(
    option: str | None, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(BF16)
    run = castwise_command("run", *([option] if option else []), "train.py", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, f"{option == '--guard'}\n"), run.stderr
    if option:
        line = next(number for number, text in enumerate(BF16.splitlines(), 1) if "hidden / hidden" in text)
        weights = ", with the weights of step 1" if option == "--snapshots" else ""
        assert f"at train.py:{line}{weights}." in run.stderr
        assert "Sample 1 of the batch, dataset[37]." in run.stderr
        assert "finite without sample 1." in run.stderr
    if option != "--guard":
        assert "Training is lost from step 10 on" in run.stderr
    if not option:
        text = " ".join(run.stderr.split())
        assert "could not be replayed. On an accelerator, castwise run --snapshots or --guard" in text


LOSSES = """
import sys
import torch
from tests.accelerator.training import DEVICE

torch.manual_seed(0)
model = torch.nn.Linear(8, 4).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 17):
    x, weights = torch.randn(4, 8).to(DEVICE), torch.full((4, 1), float(step != 10)).to(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        output = model(x)
    if sys.argv[1] == "loss":
        loss = (output.float().square() * weights).sum() / weights.sum()
    else:
        loss = (output.float() * weights).square().sum(1).sqrt().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("which", "code", "found"),
    [
        ("loss", ".sum() / weights.sum()", "In the loss, aten.div gives nan, at train.py:{}."),
        ("gradient", ".sum(1).sqrt()", "In the loss, the gradient of aten.sqrt gives inf, at train.py:{}."),
    ],
)
def test_without_a_scaler_or_an_option_the_line_of_a_loss_is_named(
    which: str, code: str, found: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LOSSES)
    run = castwise_command("run", "train.py", which, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    line = next(number for number, text in enumerate(LOSSES.splitlines(), 1) if code in text)
    text = " ".join(run.stderr.split())
    assert "Training is lost from step 10 on" in text
    assert found.format(line) in text


def test_a_step_that_the_script_leaves_out_for_its_loss_was_not_taken() -> None:
    model, records = net().to(DEVICE), list[dict[str, Any]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with castwise.Monitor(model, optimizer, sinks=[records.append], on_nonfinite="diagnose"):
        for number in range(8):
            optimizer.zero_grad()
            loss = model(torch.full((4, 8), math.nan if number == 3 else 1.0, device=DEVICE)).square().mean()
            loss.backward()
            if loss.isfinite():
                optimizer.step()
    steps = [record for record in records if record["kind"] == "step"]
    assert [(record["cause"], math.isfinite(record["loss"])) for record in steps] == [(None, True)] * 7


def test_a_schedule_that_is_exhausted_raises() -> None:
    training = Training(castwise, schedule=castwise.schedules.Dynamic(2.0**10, patience=2, on_exhausted="raise"))
    with pytest.raises(castwise.ScaleExhausted, match="non-finite loss") as raised:
        training.run(batches(24, spoilt=(*range(1, 24),)))
    assert raised.value.step.skipped
    assert raised.value.step.loss is not None
    assert not math.isfinite(raised.value.step.loss)
