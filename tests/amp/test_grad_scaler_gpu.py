"""The scaler on a GPU: no sync that the optimizer does not force, the same numbers, and whole steps in a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from castwise.amp import _measure as measure
from castwise.amp._checkpoint import KEYS
from castwise.amp._gradients import Group
from castwise.amp.grad_scaler import GradScaler

pytestmark = pytest.mark.gpu

MAX_NORMS = [None, 0.1]
KINDS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@contextmanager
def no_sync() -> Iterator[None]:
    """Make every synchronisation of the host with the GPU an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Training:
    """A small network on the GPU whose every step can be spoilt through its static input."""

    def __init__(self, max_norm: float | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.scaler = GradScaler("cuda", init_scale=2.0**10, growth_interval=3)
        self.max_norm = max_norm
        self.x = torch.zeros(4, 8, device="cuda")
        self.norm: torch.Tensor | None = None

    def fill(self, step: int) -> None:
        values = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        self.x.copy_(values * (math.inf if step % 5 == 4 else 1.0))

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(self.model(self.x).pow(2).mean()).backward()
        if self.max_norm is not None:
            self.norm = self.scaler.clip_grad_norm_(self.optimizer, self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def facts(self) -> list[Any]:
        weights = [param.tolist() for param in self.model.parameters()]
        state = {key: self.scaler.state_dict()[key] for key in KEYS}  # steps in a graph are not counted
        return [weights, state, None if self.norm is None else str(self.norm.item())]


@pytest.mark.parametrize("max_norm", MAX_NORMS)
@pytest.mark.parametrize("call", ["step alone", "unscale_ first", "values"])
def test_a_fused_step_never_waits_for_the_gpu(max_norm: float | None, call: str) -> None:
    training = Training(max_norm, fused=True)
    training.fill(0)
    training.step()
    with no_sync():
        for _ in range(3):
            training.optimizer.zero_grad()
            training.scaler.scale(training.model(training.x).pow(2).mean()).backward()
            if call == "unscale_ first":
                training.scaler.unscale_(training.optimizer)
            if call == "values":
                training.scaler.clip_grad_value_(training.optimizer, 0.5)
            if max_norm is not None:
                training.scaler.clip_grad_norm_(training.optimizer, max_norm)
            training.scaler.step(training.optimizer)
            training.scaler.update()


@pytest.mark.parametrize("max_norm", MAX_NORMS)
@pytest.mark.parametrize("kind", ["for-loop", "foreach"])
def test_other_optimizers_wait_for_an_event_and_never_for_the_whole_stream(max_norm: float | None, kind: str) -> None:
    training = Training(max_norm, **KINDS[kind])
    for step in range(6):
        training.fill(step)
        with no_sync():
            training.step()
    assert training.scaler.get_scale() == 2.0**10


@pytest.mark.parametrize("max_norm", MAX_NORMS)
def test_a_whole_step_in_a_cuda_graph_is_the_eager_one(max_norm: float | None) -> None:
    eager, graphed = (Training(max_norm, fused=True, capturable=True) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in range(3):
            graphed.fill(step)
            graphed.step()
    torch.cuda.current_stream().wait_stream(side)
    for step in range(3):
        eager.fill(step)
        eager.step()
    graph = torch.cuda.CUDAGraph()
    graphed.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        graphed.step()
    scales = []
    for step in range(3, 20):
        eager.fill(step)
        eager.step()
        graphed.fill(step)
        graph.replay()
        torch.cuda.synchronize()
        assert graphed.facts() == eager.facts(), step
        scales.append(eager.scaler.get_scale())
    assert len(set(scales)) > 2, "the scale moved up and down inside the graph"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_norm", MAX_NORMS)
def test_a_gpu_takes_and_skips_the_steps_of_a_cpu(kind: str, max_norm: float | None) -> None:
    def scales(device: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, **KINDS[kind])
        scaler = GradScaler(device, init_scale=2.0**10, growth_interval=2)
        seen = []
        for step in range(12):
            x = torch.ones(2, 8, device=device) * (math.nan if step % 4 == 3 else 1.0)
            optimizer.zero_grad()
            scaler.scale(model(x).sum()).backward()
            if max_norm is not None:
                scaler.clip_grad_norm_(optimizer, max_norm)
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
        return seen

    assert scales("cuda") == scales("cpu")


def norms(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    group = Group(tensors[0].device, tensors[0].dtype, tensors, tensors, is_complex=False, shares=None)
    _, ((_, found),) = measure.norm_of([group], norm_type, torch.ones((), device="cuda"), 1.0)
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_norms_are_those_of_float64(dtype: torch.dtype, norm_type: float) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(3,), (), (0,), (70, 90), (2**20 + 3,)]
    tensors = [torch.randn(shape, generator=draw).mul(100).to(dtype).cuda() for shape in shapes]
    expected = [
        torch.linalg.vector_norm(tensor.double(), norm_type).item() if tensor.numel() else 0.0 for tensor in tensors
    ]
    assert norms(tensors, norm_type).tolist() == pytest.approx(expected, rel=1e-6)
    tensors[3][5, 7] = math.inf
    assert measure.are_finite(tensors, torch.ones((), device="cuda")).tolist() == [True, True, True, False, True]
    assert norms(tensors, norm_type).isfinite().tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_norm", MAX_NORMS)
def test_a_gradient_that_unscaling_makes_infinite_skips_the_step(kind: str, max_norm: float | None) -> None:
    scaler, param = GradScaler("cuda", init_scale=2.0**-20), torch.nn.Parameter(torch.zeros(2, device="cuda"))
    optimizer = torch.optim.SGD([param], lr=1.0, **KINDS[kind])
    scaler.scale(torch.ones((), device="cuda"))
    param.grad = torch.tensor([1e35, 1.0], device="cuda")
    if max_norm is not None:
        scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 2.0**-21


@pytest.mark.parametrize("magnitude", [1e-30, 1e19, 1e30])
def test_squares_that_fp32_cannot_hold_do_no_harm(magnitude: float) -> None:
    found = norms([torch.full((1000,), magnitude, device="cuda")], 2.0)
    assert found.item() == pytest.approx(magnitude * math.sqrt(1000), rel=1e-6)
