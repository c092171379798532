"""What one warm iteration of ten small parameters costs, in ops, Python functions and files: torch's is the budget."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import castwise
from castwise.amp import _measure as measure
from castwise.amp import _readback as readback
from castwise.amp import grad_scaler

OURS = (os.path.dirname(castwise.__file__),)
FREE = ("profiler.", "prim.device", "aten.detach.default", "aten.view.default")  # none of them reaches a device
COMPREHENSIONS = {"<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"}
KINDS: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}}


@pytest.fixture(autouse=True)
def nobody_else_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A WeightCache made by an earlier test listens to all optimizers of the process."""
    for hooks in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(sys.modules[torch.optim.Optimizer.__module__], hooks, OrderedDict())
    monkeypatch.setattr(grad_scaler, "OBSERVERS", [])


class Ops(TorchDispatchMode):
    """The ops that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(func).startswith(FREE):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions:
    """The functions of castwise that are entered, comprehensions left out."""

    def __init__(self) -> None:
        self.entered: list[str] = []

    def __enter__(self) -> Functions:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name not in COMPREHENSIONS and code.co_filename.startswith(OURS):
            self.entered.append(code.co_filename)


def iteration(scaler: Any, *, clip: bool, device: str = "cpu", **kind: bool) -> Callable[[], None]:
    params = [torch.nn.Parameter(torch.randn(16, device=device)) for _ in range(10)]
    optimizer = torch.optim.AdamW(params, lr=1e-6, **kind)
    if device != "cpu":  # whether torch's kernels run on fake tensors is not the question
        optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
    grads, loss = [torch.randn(16, device=device) for _ in params], torch.ones((), device=device)

    def run() -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        scaler.scale(loss)
        if clip and isinstance(scaler, castwise.GradScaler):
            scaler.clip_grad_norm_(optimizer, 1.0)
        elif clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return run


def region(lib: Any) -> Callable[[], None]:
    def run() -> None:
        with lib.autocast("cpu", dtype=torch.bfloat16):
            pass

    return run


def ops(run: Callable[[], None], *, warm: int = 3) -> int:
    for _ in range(warm):
        run()
    with Ops() as counted:
        run()
    return len(counted.names)


def functions(run: Callable[[], None]) -> tuple[int, int]:
    for _ in range(3):
        run()
    with Functions() as counted:
        run()
    return len(counted.entered), len(set(counted.entered))


@pytest.mark.parametrize(
    ("kind", "clip", "most_ops", "most_functions", "most_files"),
    [
        ("fused", False, 12, 40, 7),
        ("fused", True, 17, 60, 8),
        ("foreach", False, 40, 45, 8),
        ("foreach", True, 47, 55, 8),
    ],
)
def test_an_iteration_is_within_its_budget(
    kind: str, clip: bool, most_ops: int, most_functions: int, most_files: int
) -> None:
    theirs = ops(iteration(torch.amp.GradScaler("cpu", init_scale=1024.0), clip=clip, **KINDS[kind]))
    run = iteration(castwise.GradScaler("cpu", init_scale=1024.0), clip=clip, **KINDS[kind])
    assert ops(run) <= min(theirs, most_ops)
    entered, files = functions(run)
    assert entered <= most_functions
    assert files <= most_files


def test_the_counters_notice_one_more_op_and_one_more_function() -> None:
    class Heavier(castwise.GradScaler):
        def scale(self, outputs: Any) -> Any:
            return super().scale(outputs) + 0.0

    counted = [
        iteration(cls("cpu", init_scale=1024.0), clip=True, fused=True) for cls in (castwise.GradScaler, Heavier)
    ]
    few, many = map(ops, counted)
    assert many == few + 1
    with Functions() as one:
        castwise.amp._checks.real_number("x", 1.0)
    with Functions() as two:
        castwise.amp._checks.at_least("x", 1.0, 0.0)
    assert (len(one.entered), len(two.entered)) == (1, 2)


def test_users_of_one_optimizer_have_no_hooks_after_the_first_iteration() -> None:
    param, scaler = torch.nn.Parameter(torch.ones(3)), castwise.GradScaler("cpu")
    optimizer = torch.optim.SGD([param], lr=0.1)
    for _ in range(2):
        scaled = scaler.scale(param.sum())
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
    assert not scaled._backward_hooks
    assert not param._post_accumulate_grad_hooks


# -- on an accelerator ------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(measure, "is_plain", lambda tensor: True)  # the route of plain tensors on a GPU
    monkeypatch.setattr(grad_scaler, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(readback, "copies_asynchronously", lambda device_type: False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("clip", [False, True])
def test_a_fused_step_on_an_accelerator_queues_no_more_ops_than_torch(clip: bool) -> None:
    theirs = ops(iteration(torch.amp.GradScaler("cuda"), clip=clip, device="cuda", fused=True), warm=0)
    ours = ops(iteration(castwise.GradScaler("cuda"), clip=clip, device="cuda", fused=True), warm=0)
    assert ours <= theirs


# -- among ranks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A fake group of so many ranks that all do the same; the collectives of castwise."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    fake, collectives = torch.distributed.all_reduce, []

    def all_reduce(tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        work = fake(tensor, op, *args, **kwargs)
        if tensor.dtype is torch.float64 and op == torch.distributed.ReduceOp.SUM:
            collectives.append(str(tuple(tensor.shape)))
            tensor.numpy().__imul__(request.param)  # no op
        return work

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    yield collectives
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [1], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [False, True])
def test_a_group_of_one_rank_costs_nothing(ranks: list[str], kind: str, clip: bool) -> None:
    plain = ops(iteration(torch.amp.GradScaler("cpu", init_scale=1024.0), clip=clip, **KINDS[kind]))
    ours = ops(iteration(castwise.ShardedGradScaler("cpu", init_scale=1024.0), clip=clip, **KINDS[kind]))
    assert ours <= plain
    assert ranks == []


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [False, True])
def test_two_ranks_take_one_collective_and_no_more_ops_than_torchs_sharded_foreach_step(
    ranks: list[str], kind: str, clip: bool
) -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    theirs = ops(iteration(ShardedGradScaler("cpu", init_scale=1024.0), clip=clip, foreach=True))
    ours = ops(iteration(castwise.ShardedGradScaler("cpu", init_scale=1024.0), clip=clip, **KINDS[kind]))
    assert ours <= theirs
    assert ranks == ["(8,)"] * 4  # three warm iterations and the one that is counted
