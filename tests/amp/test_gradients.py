"""`gradients`: which gradients an optimizer has, and in which lists native ops can take them."""

from __future__ import annotations

import re

import pytest
import torch

from castwise.amp import _gradients as gradients
from castwise.amp._gradients import Gradients

CPU = torch.device("cpu")


def optimizer_of(*grads: torch.Tensor | None) -> torch.optim.Optimizer:
    params = []
    for grad in grads:
        like = torch.zeros(2) if grad is None else grad
        param = torch.nn.Parameter(torch.zeros(like.shape, dtype=like.dtype), requires_grad=False)
        if grad is not None and not (grad.is_floating_point() or grad.is_complex()):
            param.grad_dtype = grad.dtype
        param.grad = grad
        params.append(param)
    return torch.optim.SGD(params, lr=0.1)


def found_in(optimizer: torch.optim.Optimizer, **options: bool) -> Gradients:
    return gradients.collect(optimizer, **{"allow_fp16": True, **options})


def collect(*grads: torch.Tensor | None, **options: bool) -> Gradients:
    return found_in(optimizer_of(*grads), **options)


def multiply(grads: Gradients, factor: float) -> None:
    for group in grads.groups:
        torch._amp_foreach_non_finite_check_and_unscale_(group.tensors, torch.zeros(()), torch.tensor(factor))


def test_every_gradient_is_listed_once_in_the_order_of_parameters() -> None:
    first, second = torch.ones(2), torch.ones(3)
    optimizer = optimizer_of(first, None, second)
    optimizer.param_groups.append(optimizer.param_groups[0])
    grads = found_in(optimizer)
    (group,) = grads.groups
    assert [id(grad) for grad in group.tensors] == [id(first), id(second)]
    params = optimizer.param_groups[0]["params"]
    assert [id(param) for param in grads.params] == [id(params[0]), id(params[2])]


def test_values_are_grouped_by_what_one_call_can_take() -> None:
    grads = collect(torch.ones(2), torch.ones(3).double(), torch.ones(4), torch.ones(2, dtype=torch.complex64))
    assert [[tuple(t.shape) for t in group.tensors] for group in grads.groups] == [[(2,), (4,)], [(3,)], [(2, 2)]]
    assert [group.device for group in grads.groups] == [CPU] * 3
    assert [group.dtype for group in grads.groups] == [torch.float32, torch.float64, torch.float32]
    assert [group.is_complex for group in grads.groups] == [False, False, True]
    assert grads.is_double()
    for group in grads.groups:
        assert [param.grad is not None for param in group.params] == [True] * len(group.tensors)


def test_what_changes_between_steps_is_noticed() -> None:
    optimizer = optimizer_of(torch.ones(2), torch.ones(3))
    params = optimizer.param_groups[0]["params"]

    def seen() -> list[list[list[float]]]:
        return [[tensor.flatten().tolist() for tensor in group.tensors] for group in found_in(optimizer).groups]

    both = [[[1.0, 1.0], [1.0, 1.0, 1.0]]]
    assert seen() == both
    assert seen() == both
    params[0].grad = None
    assert seen() == [[[1.0, 1.0, 1.0]]]
    params[0].grad = torch.full((2,), 5.0)
    assert seen() == [[[5.0, 5.0], [1.0, 1.0, 1.0]]]
    late = torch.nn.Parameter(torch.zeros(1))
    late.grad = torch.ones(1)
    optimizer.add_param_group({"params": [late]})
    assert seen() == [[[5.0, 5.0], [1.0, 1.0, 1.0], [1.0]]]
    params[1].grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([7.0]), (3,), check_invariants=True)
    assert seen() == [[[5.0, 5.0], [1.0]], [[7.0]]]
    params[1].data = params[1].data.double()
    params[1].grad = torch.full((3,), 2.0, dtype=torch.float64)
    assert seen() == [[[5.0, 5.0], [1.0]], [[2.0, 2.0, 2.0]]]


def test_fp16_gradients_are_refused_by_name_or_by_place() -> None:
    module = torch.nn.Linear(2, 1).half()
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    by_name = torch.optim.SGD(module.named_parameters(), lr=0.1)
    message = (
        "Attempting to unscale FP16 gradients. They may underflow once unscaled: keep the parameters in fp32 and "
        "let autocast choose fp16 op by op, or allow them with GradScaler(..., allow_fp16_gradients=True). "
        "fp16 gradients: weight, bias"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        found_in(by_name, allow_fp16=False)
    by_place = torch.optim.SGD(module.parameters(), lr=0.1)
    place = re.escape("param_groups[0]['params'][0] of shape (1, 2), param_groups[0]['params'][1] of shape (1,)")
    with pytest.raises(ValueError, match=place):
        found_in(by_place, allow_fp16=False)
    collect(torch.ones(2), allow_fp16=False)


def test_what_is_not_an_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="expected an optimizer with param_groups, got Linear"):
        found_in(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    optimizer = optimizer_of(torch.ones(1))
    optimizer.param_groups[0]["params"].append(1.0)
    with pytest.raises(TypeError, match="an optimizer's parameters must be tensors, got float"):
        found_in(optimizer)


@pytest.mark.parametrize(
    ("grad", "what"),
    [
        (torch.ones(2, 2).to_sparse_csr(), "dtype torch.float32 and layout torch.sparse_csr"),
        (torch.ones(2, 2).to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn and layout torch.strided"),
        (torch.ones(2, 2).int(), "dtype torch.int32 and layout torch.strided"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_gradients_of_other_kinds_are_refused_by_name_every_time(grad: torch.Tensor, what: str) -> None:
    param = torch.nn.Parameter(torch.zeros(2, 2))

    class Holder:
        """Anything may hold a gradient for a third-party optimizer."""

        shape = param.shape

    holder = Holder()
    holder.grad = grad  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.param_groups[0]["params"].append(holder)
    param.grad = torch.ones(2, 2)
    for _ in range(2):
        with pytest.raises(TypeError, match=re.escape(f"param_groups[0]['params'][1] of shape (2, 2) has {what}")):
            found_in(optimizer)


def test_complex_gradients_are_refused_by_name_where_order_matters() -> None:
    message = "param_groups[0]['params'][1] of shape (2,) is torch.complex64; use clip_grad_norm_"
    with pytest.raises(TypeError, match=f"{re.escape(message)}$"):
        collect(torch.ones(2), torch.ones(2, dtype=torch.complex64), allow_complex=False)
    collect(torch.ones(2), allow_complex=False)


def test_duplicates_of_a_sparse_gradient_are_summed_in_place_of_it() -> None:
    def sparse(dtype: torch.dtype) -> torch.Tensor:
        values = torch.tensor([60000.0, 60000.0]).to(dtype)
        return torch.sparse_coo_tensor(torch.tensor([[1, 1]]), values, (3,), check_invariants=True)

    optimizer = optimizer_of(sparse(torch.float16), sparse(torch.float32))
    params = optimizer.param_groups[0]["params"]
    found = found_in(optimizer)
    assert [param.grad.is_coalesced() for param in params] == [True, False]
    assert found.groups[0].tensors[0].isinf().any(), "the sum overflows, which has to be seen"
    found_in(optimizer, sum_duplicates=True)
    assert params[1].grad.is_coalesced()


def test_values_share_memory_with_their_gradients() -> None:
    grads = [
        torch.ones(2, 2).t(),
        torch.full((2,), 1 + 1j),
        torch.full((2,), 1 + 1j).conj(),
        torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True),
        torch.ones(3, dtype=torch.float64),
        torch.empty(0),
    ]
    multiply(collect(*grads), 0.5)
    assert torch.equal(grads[0], torch.full((2, 2), 0.5))
    assert torch.equal(grads[1], torch.full((2,), 0.5 + 0.5j))
    assert torch.equal(grads[2].resolve_conj(), torch.full((2,), 0.5 - 0.5j))
    assert torch.equal(grads[3].to_dense(), torch.tensor([1.5, 0.0, 0.0]))
    assert torch.equal(grads[4], torch.full((3,), 0.5, dtype=torch.float64))


def test_gradients_that_cannot_be_written_to_are_replaced_by_copies() -> None:
    flat = torch.arange(6.0)
    overlapping = flat.as_strided((2, 3), (2, 1))
    negated = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    assert negated.is_neg()
    optimizer = optimizer_of(torch.tensor([4.0]).expand(3), overlapping, negated, torch.ones(4, 2)[:, 0])
    gap = optimizer.param_groups[0]["params"][3].grad
    multiply(found_in(optimizer), 0.5)
    expanded, overlapped, positive, strided = (param.grad for param in optimizer.param_groups[0]["params"])
    assert expanded.tolist() == [2.0, 2.0, 2.0]
    assert overlapped.tolist() == [[0.0, 0.5, 1.0], [1.0, 1.5, 2.0]]
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert positive.tolist() == [-1.0, -2.0]
    assert strided is gap, "a gap between elements is no reason to copy"


def test_a_parameter_is_named_by_its_group_or_its_shape_where_nobody_knows_more() -> None:
    first, second = torch.ones(1, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    second.grad = torch.ones(2, 3)
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [first.detach(), second]}])
    assert gradients._name(optimizer, second) == "param_groups[1]['params'][1] of shape (2, 3)"
    optimizer.param_groups.pop()
    assert gradients._name(optimizer, second) == "a parameter of shape (2, 3)"


@pytest.mark.parametrize(
    ("shape", "stride", "overlaps"),
    [
        ((2, 3, 2), (1, 2, 6), False),
        ((2, 3, 2), (1, 2, 5), True),
        ((2, 3, 2), (6, 2, 1), False),
        ((3, 1), (1, 0), False),
        ((3, 2), (1, 0), True),
        ((1, 1), (0, 0), False),
    ],
)
def test_elements_that_share_memory_are_found(shape: tuple[int, ...], stride: tuple[int, ...], overlaps: bool) -> None:
    assert gradients._overlaps(torch.zeros(20).as_strided(shape, stride)) is overlaps


def test_a_name_that_the_optimizer_lacks_is_its_place() -> None:
    optimizer = optimizer_of(torch.ones(1), torch.ones(2))
    optimizer.param_groups[0]["param_names"] = ["first"]
    names = [gradients._name(optimizer, param) for param in optimizer.param_groups[0]["params"]]
    assert names == ["first", "param_groups[0]['params'][1] of shape (2,)"]


def test_whether_a_gradient_is_there_twice_is_reported() -> None:
    assert not collect(torch.ones(1), torch.ones(1)).repeat
    shared = torch.ones(1)
    found = collect(shared, torch.ones(1), shared)
    assert found.repeat
    assert [len(group.tensors) for group in found.groups] == [2]


def test_what_can_be_unscaled_is_listed() -> None:
    optimizer = optimizer_of(torch.ones(2, 2).to(torch.float8_e4m3fn))
    dtypes = "float16, complex32, bfloat16, float32, float64, complex64, complex128"
    message = (
        "the gradient of param_groups[0]['params'][0] of shape (2, 2) has dtype torch.float8_e4m3fn and layout "
        f"torch.strided, which cannot be unscaled: use {', '.join(f'torch.{name}' for name in dtypes.split(', '))} in "
        "torch.strided, torch.sparse_coo"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        found_in(optimizer)


def test_the_second_gradient_that_cannot_be_written_to_is_replaced_as_well() -> None:
    negated = torch._neg_view(torch.ones(3))
    assert negated.is_contiguous()
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (3,), check_invariants=True)
    optimizer = optimizer_of(sparse, torch.ones(2), negated, torch.ones(1).expand(4))
    multiply(found_in(optimizer), 0.5)
    assert [param.grad.is_neg() for param in optimizer.param_groups[0]["params"][1:]] == [False] * 3
    assert negated.tolist() == [-1.0, -1.0, -1.0]
    assert [param.grad.tolist() for param in optimizer.param_groups[0]["params"][1:]] == [
        [0.5, 0.5],
        [-0.5, -0.5, -0.5],
        [0.5, 0.5, 0.5, 0.5],
    ]


def test_gradients_can_be_parted_by_parameter() -> None:
    found = collect(torch.ones(2), torch.ones(3).double(), torch.ones(4))
    first, second, third = found.params
    for part, shapes in ((found.without({first}), [[(4,)], [(3,)]]), (found.only({second}), [[(3,)]])):
        assert [[tuple(t.shape) for t in group.tensors] for group in part.groups] == shapes
    assert found.without({first}).params == [second, third]
    shared = found.groups[0]._replace(shares=[0.5, 0.25])
    assert Gradients(found.params, [shared], False).without({first}).groups[0].shares == [0.25]


def test_writes_are_counted_except_in_inference_mode() -> None:
    one, other = torch.ones(1), torch.ones(1)
    one.zero_()
    with torch.inference_mode():
        free = torch.ones(1)
    assert gradients.versions_of([one, other]) == [1, 0]
    assert gradients.versions_of([one, free]) == [1, 0]


class Sub(torch.Tensor):
    """Of which torch's ops may mean anything."""


def test_a_subclass_is_not_plain_and_has_a_group_of_its_own() -> None:
    sub = torch.ones(1).as_subclass(Sub)
    assert not gradients.is_plain(sub)
    assert gradients.is_plain(torch.ones(1))
    assert gradients.is_plain(torch.nn.Parameter(torch.ones(1)))
    assert [len(group.tensors) for group in collect(torch.ones(1), sub, torch.ones(1)).groups] == [2, 1]
