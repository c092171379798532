"""The simulated device itself: what it is there to notice, it notices."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.accelerator.availability import why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
if not why_unavailable():
    from tests.accelerator.device import Counted, take_hazards


def ones() -> torch.Tensor:
    return torch.ones(3, device="sim")


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


def test_ops_compute_what_a_cpu_computes_in_one_launch_each() -> None:
    with Counted() as counted:
        y = (torch.arange(6.0, device="sim").reshape(2, 3) + 1.0).T
    assert y.device == torch.device("sim", 0)
    assert y.cpu().tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
    assert (counted.launches, counted.host_waits) == (2, 0)


@pytest.mark.parametrize(
    ("read", "wait"),
    [
        (lambda x: x[0].item(), "item"),
        (lambda x: x.cpu(), "copy to the host"),
        (lambda x: torch.zeros(3).copy_(x, non_blocking=True), "copy to the host"),  # which is not pinned
        (lambda x: pinned(0.0, 0.0, 0.0).copy_(x), "copy to the host"),
        (lambda x: x.copy_(torch.zeros(3)), "copy to the device"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: x[x > 0], "aten::nonzero"),
        (lambda x: torch.equal(x, x), "aten::equal"),
        (lambda x: torch.where(x > 0, x, torch.tensor(0.0)), "aten::where"),
        (lambda x: torch.sim.synchronize(), "device"),  # type: ignore[attr-defined]
        (lambda x: torch.accelerator.current_stream().synchronize(), "stream"),
    ],
)
def test_what_makes_the_host_wait_is_counted_with_its_line(read: object, wait: str) -> None:
    x = ones()
    with Counted() as counted:
        read(x)  # type: ignore[operator]
    assert counted.waits == {wait: 1}
    ((line, count),) = counted.lines.items()
    assert line.startswith(f"{wait} in test_device.py:")
    assert count == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.mul_(2.0).clamp_(max=1.0),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x * torch.tensor(2.0),
        lambda x: x.copy_(torch.zeros(3), non_blocking=True),
        lambda x: torch.zeros(3).pin_memory().copy_(x, non_blocking=True),
        lambda x: torch.tensor([1.0]).to("sim", non_blocking=True),
        lambda x: x.to("cpu", non_blocking=True),  # which torch pins
    ],
)
def test_what_does_not_make_the_host_wait_is_not_counted(use: object) -> None:
    x = ones()
    with Counted() as counted:
        use(x)  # type: ignore[operator]
    assert counted.waits == {}


def test_a_late_copy_is_nan_until_its_event_is_waited_for() -> None:
    x, host = ones(), pinned(0.0, 0.0, 0.0)
    host.copy_(x, non_blocking=True)
    arrived = torch.accelerator.current_stream().record_event()
    assert host.isnan().all()
    assert not arrived.query()
    with Counted() as counted:
        arrived.synchronize()
    assert counted.waits == {"event": 1}
    assert host.tolist() == [1.0, 1.0, 1.0]
    assert arrived.query()


def test_waiting_for_a_stream_completes_what_that_stream_waits_for() -> None:
    x, host, side = ones(), pinned(0.0, 0.0, 0.0), torch.Stream("sim")
    host.copy_(x, non_blocking=True)
    side.wait_event(torch.accelerator.current_stream().record_event())
    side.synchronize()
    assert host.tolist() == [1.0, 1.0, 1.0]


def test_pinned_memory_that_changes_before_it_is_copied_is_a_hazard() -> None:
    host = pinned(1.0)
    host.to("sim", non_blocking=True)
    host.fill_(2.0)
    assert take_hazards() == ["pinned memory is written before its copy to the device is complete"]


@pytest.mark.parametrize("waits", [True, False])
def test_a_tensor_on_two_streams_needs_an_event_in_between(waits: bool) -> None:
    x, side = torch.empty(3, device="sim"), torch.Stream("sim")
    x.fill_(1.0)
    written = torch.accelerator.current_stream().record_event()
    with side:
        if waits:
            side.wait_event(written)
        y = x * 2.0
    assert bool(take_hazards()) != waits
    assert y.cpu().tolist() == [2.0, 2.0, 2.0]


def test_tensors_of_two_devices_do_not_mix() -> None:
    x = torch.ones(3, device="sim:1")
    with pytest.raises(RuntimeError, match="same device"):
        ones() + x
    with pytest.raises(RuntimeError, match="one is on the CPU"):
        torch.cat([ones(), torch.ones(3)])
    assert (ones() + x.to("sim:0")).cpu().tolist() == [2.0, 2.0, 2.0]


def test_a_backward_runs_in_a_thread_of_its_own() -> None:
    x, threads = ones().requires_grad_(), list[int]()
    x.register_hook(lambda grad: threads.append(threading.get_ident()))
    x.sum().backward()
    assert threads != [threading.get_ident()]


def test_autocast_has_the_lists_of_cuda() -> None:
    x = torch.rand(2, 2, device="sim")
    with torch.autocast("sim", dtype=torch.float16):
        assert (x @ x).dtype is torch.float16
        assert (x @ x).softmax(0).dtype is torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            torch.nn.functional.binary_cross_entropy(x, x)


def test_uninitialised_memory_is_nan() -> None:
    assert torch.empty(3, device="sim").cpu().isnan().all()
