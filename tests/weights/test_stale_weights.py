"""Writes to weights that bump no version: found at once, or by the comparison of a slice in each region."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import castwise
from castwise import WeightCache
from castwise.weights import _weight_copies as weight_copies

BF16 = torch.bfloat16
STALE = (
    r"the weight .* was changed in a way that leaves no trace, .*: call WeightCache\.invalidate\(\) after such a write"
)


def forward(model: nn.Module, cache: WeightCache | None, dtype: torch.dtype = BF16) -> torch.Tensor:
    x = torch.ones(1, next(model.parameters()).shape[-1])
    with torch.no_grad(), castwise.autocast("cpu", dtype=dtype, weight_cache=cache):
        return model(x)  # type: ignore[no-any-return]


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)


def chain(width: int, layers: int, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, **options) for _ in range(layers)))


def until_found(run: Callable[[], object]) -> tuple[int, str]:
    for count in range(1000):
        try:
            run()
        except RuntimeError as error:
            return count + 1, str(error)
    raise AssertionError("not found")


def regions_until_found(model: nn.Module, cache: WeightCache) -> int:
    count, text = until_found(lambda: forward(model, cache))
    assert re.match(STALE, text)
    return count


# -- on the move ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "layers", "which"),
    [
        *((*size, which) for size in ((4, 2), (8, 30), (64, 3), (512, 3)) for which in (0, 1, -1)),
        (8, 150, -1),  # more of them than regions; the time is their square
    ],
)
def test_a_stale_copy_is_found_within_200_regions_and_one_for_each_weight(width: int, layers: int, which: int) -> None:
    model = chain(width, layers)
    cache = WeightCache(model)
    for _ in range(3):
        forward(model, cache)
    weight = model[which].weight
    weight.data[-1, -1] += 1.0
    assert regions_until_found(model, cache) <= 200 + len(list(model.parameters()))
    same(forward(model, cache), forward(model, None))
    for _ in range(300):
        forward(model, cache)


def test_the_error_names_the_weight_and_the_remedy() -> None:
    model = chain(4, 2)
    cache = WeightCache(model)
    forward(model, cache)
    model[1].bias.data += 1.0
    text = (
        "the weight 1.bias was changed in a way that leaves no trace, such as a write through .data, and its old value "
        "may have been used since: call WeightCache.invalidate() after such a write"
    )
    assert until_found(lambda: forward(model, cache))[1] == text


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda data: data.t(),
    "fewer rows": lambda data: data[:4],
    "another shape": lambda data: data.view(4, 16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verify", ["rolling", True, False])
def test_another_layout_of_the_same_memory_is_a_change(layout: str, verify: bool | str) -> None:
    model = chain(8, 1, bias=False)
    cache = WeightCache(model, verify=verify)
    forward(model, cache)
    model[0].weight.data = LAYOUTS[layout](model[0].weight.data)
    for _ in range(3):
        same(forward(model, cache), forward(model, None))
    assert cache.report().refreshes == 2


def test_a_bias_of_other_strides_is_a_change() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].bias.data = torch.arange(8.0)[:4]
    cache = WeightCache(model)
    forward(model, cache)
    model[0].bias.data = model[0].bias.data.as_strided((4,), (2,))
    same(forward(model, cache), forward(model, None))


def test_no_stale_copy_is_used_again_once_one_is_found() -> None:
    model = chain(4, 3)
    cache = WeightCache(model)
    forward(model, cache)
    for layer in model:
        layer.weight.data += 1.0
    until_found(lambda: forward(model, cache))
    same(forward(model, cache), forward(model, None))


def test_a_region_that_finds_one_is_not_entered() -> None:
    model = chain(4, 1, bias=False)
    cache = WeightCache(model)
    forward(model, cache)
    model[0].weight.data += 1.0
    with pytest.raises(RuntimeError, match=STALE):
        forward(model, cache)
    assert not torch.is_autocast_enabled("cpu")
    assert "forward" not in vars(model[0])
    cache.invalidate()
    same(forward(model, cache), forward(model, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_that_are_not_numbers_are_no_alarm(dtype: torch.dtype) -> None:
    model = chain(33, 2)
    with torch.no_grad():
        for param in model.parameters():
            bits = param.view(-1)[:5].view(torch.int32)
            bits.copy_(torch.tensor([0x7FC00000, 0x7F800001, -1, 0x7F800000, 0]))
    cache = WeightCache(model)
    for _ in range(20):
        same(forward(model, cache, dtype), forward(model, None, dtype))
    model[0].weight.data[0, 0] = 1.0
    until_found(lambda: forward(model, cache, dtype))


@pytest.mark.parametrize("layout", ["transposed", "channels last"])
def test_weights_of_any_dense_layout_are_compared(layout: str) -> None:
    if layout == "transposed":
        model: nn.Module = nn.Linear(200, 200)
        model.weight = nn.Parameter(torch.randn(200, 200).t())
        x = torch.randn(1, 200)
    else:
        model = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)
        x = torch.randn(1, 64, 4, 4)
    cache = WeightCache(model)

    def run() -> None:
        with torch.no_grad(), castwise.autocast("cpu", dtype=BF16, weight_cache=cache):
            model(x)

    for _ in range(20):
        run()
    model.weight.data[-1, -1] += 1.0
    assert until_found(run)[0] <= 4


def test_at_most_half_a_percent_or_64_kib_or_one_weight_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    differs = weight_copies.Copy.differs

    def noting(copy: weight_copies.Copy, start: int, stop: int) -> Any:
        compared.append(4 * (stop - start))
        return differs(copy, start, stop)

    monkeypatch.setattr(weight_copies.Copy, "differs", noting)
    for model, most, regions in (
        (chain(4, 10, bias=False), 64, 10),  # a weight each
        (chain(16, 400, bias=False), 2 * 1024, 200),  # 0.5%
        (chain(512, 2, bias=False), 1 << 16, 32),  # 64 KiB
    ):
        cache = WeightCache(model)
        forward(model, cache)
        compared.clear()
        for _ in range(regions):
            before = sum(compared)
            forward(model, cache)
            assert 0 < sum(compared) - before <= most
        assert sum(compared) == sum(param.nbytes for param in model.parameters())


def test_what_changes_by_an_optimizer_is_no_alarm() -> None:
    model = chain(8, 5)
    cache = WeightCache(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(40):
        forward(model, cache)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        same(forward(model, cache), forward(model, None))


def test_nothing_is_compared_on_request() -> None:
    model = chain(4, 1)
    cache = WeightCache(model, verify=False)
    before = forward(model, cache)
    model[0].weight.data += 1.0
    for _ in range(300):
        same(forward(model, cache), before)


def test_flags_of_an_accelerator_are_read_when_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's tensors stand in for those of a device whose results arrive after some regions."""
    arrived = [False]
    monkeypatch.setattr(weight_copies.Readback, "has_arrived", property(lambda _: arrived[0]))
    differs = weight_copies.Copy.differs
    monkeypatch.setattr(weight_copies.Copy, "differs", lambda copy, *which: torch.tensor(differs(copy, *which)))
    model = chain(4, 1, bias=False)
    cache = WeightCache(model)
    forward(model, cache)
    model[0].weight.data += 1.0
    for _ in range(10):
        forward(model, cache)
    arrived[0] = True
    with pytest.raises(RuntimeError, match=STALE):
        forward(model, cache)
    cache.invalidate()
    same(forward(model, cache), forward(model, None))


# -- what libraries do ------------------------------------------------------------------------------------------------


def peft_merge(model: nn.Sequential) -> Callable[[], None]:
    """`peft.tuners.lora.layer.Linear.merge` (0.21.2), and `unmerge` with a minus."""
    delta = torch.randn_like(model[0].weight)

    def merge() -> None:
        model[0].weight.data += delta

    return merge


def diffusers_ema(model: nn.Sequential) -> Callable[[], None]:
    """`diffusers.training_utils.EMAModel.copy_to` (0.42.1); `restore` writes alike."""
    shadow = [param.detach() * 1.5 for param in model.parameters()]

    def copy_to() -> None:
        for average, param in zip(shadow, model.parameters(), strict=True):
            param.data.copy_(average.to(param.device).data)

    return copy_to


def diffusers_ema_foreach(model: nn.Sequential) -> Callable[[], None]:
    shadow = [param.detach() * 1.5 for param in model.parameters()]
    return lambda: torch._foreach_copy_([param.data for param in model.parameters()], shadow)


def lightning_averages(model: nn.Sequential) -> Callable[[], None]:
    """The function of the installed Lightning."""
    callback = pytest.importorskip("lightning.pytorch.callbacks").WeightAveraging()
    callback._average_model = torch.optim.swa_utils.AveragedModel(model)
    for param in callback._average_model.parameters():
        param.data.mul_(1.5)
    return lambda: callback._swap_models(model)


def unwrapped_fused_step(model: nn.Sequential) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return lambda: torch.optim.SGD.step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # of the wrapper


def vector_behind_views(model: nn.Sequential) -> Callable[[], None]:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector, model.parameters())

    def write() -> None:
        vector.mul_(2)

    return write


ON_THE_MOVE = (
    *(peft_merge, diffusers_ema, diffusers_ema_foreach, lightning_averages),
    *(unwrapped_fused_step, vector_behind_views),
)


@pytest.mark.parametrize("prepare", ON_THE_MOVE)
def test_a_library_that_leaves_no_trace_is_found_on_the_move(
    prepare: Callable[[nn.Sequential], Callable[[], None]],
) -> None:
    model = chain(8, 3)
    write = prepare(model)
    cache = WeightCache(model)
    for _ in range(3):
        forward(model, cache)
    write()
    assert regions_until_found(model, cache) <= 200 + 6
    cache.invalidate()
    same(forward(model, cache), forward(model, None))


def alias_by_data(param: nn.Parameter) -> torch.Tensor:
    return param.data


def alias_by_detach(param: nn.Parameter) -> torch.Tensor:
    return param.detach()


def view_of_half(param: nn.Parameter) -> torch.Tensor:
    return param.detach().view(-1)[param.numel() // 2 :]


@pytest.mark.parametrize("alias", [alias_by_data, alias_by_detach, view_of_half])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_over_aliases_is_seen_at_once(alias: Callable[[nn.Parameter], torch.Tensor], fused: bool) -> None:
    model = chain(8, 3)
    cache = WeightCache(model, verify=False)
    forward(model, cache)
    aliases = [alias(param).requires_grad_() for param in model.parameters()]
    for tensor in aliases:
        tensor.grad = torch.ones_like(tensor)
    torch.optim.AdamW(aliases, lr=0.1, fused=fused).step()
    same(forward(model, cache), forward(model, None))


# -- collectives ------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1, timeout=timeout)
    yield
    dist.destroy_process_group()


COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "all_reduce": dist.all_reduce,
    "asynchronous all_reduce": lambda tensor: dist.all_reduce(tensor, async_op=True).wait(),
    "reduce": lambda tensor: dist.reduce(tensor, 0),
    "scatter": lambda tensor: dist.scatter(tensor, [tensor.clone() * 2], 0),
    "all_to_all_single": lambda tensor: dist.all_to_all_single(tensor, tensor.clone() * 2),
    "all_gather": lambda tensor: dist.all_gather([tensor], tensor.clone() * 2),
    "all_gather_into_tensor": lambda tensor: dist.all_gather_into_tensor(tensor, tensor.clone() * 2),
    "method of the group": lambda tensor: dist.group.WORLD.allreduce([tensor]).wait(),  # type: ignore[union-attr]
    "broadcast of .data": lambda tensor: dist.broadcast(tensor.data, 0),
    "all_gather into .data": lambda tensor: dist.all_gather([tensor.data], tensor.clone() * 2),
    "all_gather_into_tensor of .data": lambda tensor: dist.all_gather_into_tensor(tensor.data, tensor.clone() * 2),
    "reduce_scatter of .data": lambda tensor: dist.reduce_scatter(tensor.data, [tensor.clone() * 2]),
    "reduce_scatter_tensor of .data": lambda tensor: dist.reduce_scatter_tensor(tensor.data, tensor.clone() * 2),
    "gather into .data": lambda tensor: dist.gather(tensor.clone() * 2, [tensor.data]),
}


@pytest.mark.filterwarnings("ignore:.*(all_gather_into|reduce_scatter)_tensor.*:FutureWarning")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_on_a_weight_has_it_cast_again(name: str, group: None) -> None:
    model = chain(4, 2)
    cache = WeightCache(model, verify=False)
    forward(model, cache)
    casts = cache.report().refreshes
    with torch.no_grad():
        COLLECTIVES[name](model[0].weight)
    same(forward(model, cache), forward(model, None))
    assert cache.report().refreshes == casts + 1


def test_a_collective_on_something_else_leaves_copies_alone(group: None) -> None:
    model = chain(4, 2)
    cache = WeightCache(model)
    forward(model, cache)
    ones = torch.ones(3)
    dist.all_reduce(ones)
    same(ones, torch.ones(3))
    forward(model, cache)
    assert cache.report().refreshes == 4


RECEIVING: dict[str, Callable[[torch.Tensor], Any]] = {
    "recv": lambda tensor: dist.recv(tensor, 1),
    "irecv": lambda tensor: dist.irecv(tensor, 1),
    "batch_isend_irecv": lambda tensor: dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, 1)]),
}


@pytest.mark.parametrize("name", RECEIVING)
def test_a_weight_that_is_received_is_cast_again(name: str) -> None:
    """The group is torch's fake one: nothing is sent, and the weight stays as it is."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    try:
        model = chain(4, 2)
        cache = WeightCache(model)
        forward(model, cache)
        RECEIVING[name](model[0].weight)
        forward(model, cache)
        assert cache.report().refreshes == 5
    finally:
        dist.destroy_process_group()
