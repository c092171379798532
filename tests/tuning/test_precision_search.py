"""`tune`: the cheapest policy within the tolerance, near to that of trying all, and everything put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from tests.comparison import planted
from tests.tuning import small_models
from torch import Tensor, nn

import castwise
from castwise import Policy
from castwise.comparison._watched_calls import Watch
from castwise.tuning import Tuned
from castwise.tuning import _precision_search as precision_search
from castwise.tuning._costs import OutputBytes


class Model(nn.Module):
    """Layers of which the last is so sensitive that bf16 changes the loss, and attention with ops of its own."""

    def __init__(self, scale: float = 50.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.norm, self.unused = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(3, 3)
        self.head = nn.Linear(8, 4)
        with torch.no_grad():
            self.head.weight.mul_(scale)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query[None, None], key[None, None], value[None, None])[0, 0]
        return self.head(self.norm(x + mixed))  # type: ignore[no-any-return]


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 8, generator=draw), torch.randint(4, (16,), generator=draw)) for _ in range(count)]


def tuned(tolerance: float, **options: Any) -> Tuned:
    options = {"formats": ("bfloat16", "float32"), "loss": F.cross_entropy, **options}
    return castwise.tune(Model(), batches(), tolerance=tolerance, **options)


def error(policy: Policy, held_out: list[tuple[Tensor, Tensor]]) -> float:
    model, found = Model(), []
    for x, target in held_out:
        expected = float(F.cross_entropy(model(x), target).detach())
        with castwise.autocast("cpu", policy=policy.bind(model)):
            found.append(abs(float(F.cross_entropy(model(x), target).detach()) - expected) / expected)
    return sum(found) / len(found)


def test_a_wide_tolerance_gives_the_cheapest_uniform_policy() -> None:
    best = tuned(0.5)
    assert best.policy == Policy(compute="bfloat16")
    assert best.cost == 0.5
    assert best.is_within_tolerance
    assert best.not_called == ("unused",)


def test_a_narrow_tolerance_leaves_what_matters_in_fp32() -> None:
    wide, narrow = tuned(0.5), tuned(2e-4)
    assert wide.error > 2e-4 >= narrow.error
    assert 0.5 < narrow.cost < 1.0
    assert narrow.formats["head"] == "float32"
    assert narrow.is_within_tolerance


def test_the_error_is_that_of_the_held_out_batches() -> None:
    for best in (tuned(0.5), tuned(2e-4)):
        assert best.error == pytest.approx(error(best.policy, batches()[1::2]), rel=1e-6)
        assert best.search_error == pytest.approx(error(best.policy, batches()[::2]), rel=1e-6)


def test_the_frontier_falls_and_has_the_chosen_point() -> None:
    best = tuned(2e-4)
    points = best.frontier.points
    assert [point.policy for point in points if point.is_chosen] == [best.policy]
    others = [point for point in points if not point.is_chosen]
    assert [point.cost for point in points] == sorted(point.cost for point in points)
    assert [point.error for point in others] == sorted((point.error for point in others), reverse=True)


def test_a_tolerance_out_of_reach_returns_the_nearest_and_says_so() -> None:
    best = tuned(1e-9, formats=("bfloat16",))
    assert not best.is_within_tolerance
    assert best.policy == Policy(compute="bfloat16")
    assert "this is the closest" in str(best)


def test_of_policies_out_of_tolerance_the_one_with_the_least_held_out_error_is_returned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).bfloat16()
    given = [(x.bfloat16(), target) for x, target in batches(8)]
    options: Any = {"loss": F.cross_entropy, "formats": ("bfloat16", "float32")}
    best = castwise.tune(model, given, tolerance=1e-6, **options)
    assert not best.is_within_tolerance
    points = {point.policy: point for point in best.frontier.points}
    drift = castwise.compare(model, given[1::2], {str(policy): policy for policy in points}, loss=F.cross_entropy)
    errors = {policy: drift[str(policy)].summary.relative_loss_error for policy in points}
    assert errors[best.policy] == pytest.approx(best.error)
    assert best.error == pytest.approx(min(errors.values()))


def test_the_same_call_has_the_same_result() -> None:
    assert str(tuned(2e-4)) == str(tuned(2e-4))
    assert tuned(2e-4).as_dict() == tuned(2e-4).as_dict()


@pytest.mark.parametrize("cost", ["flops", "bytes", "measured"])
def test_each_cost_has_its_result(cost: str) -> None:
    best = tuned(0.5, cost=cost)
    assert best.cost_kind == cost
    assert 0 < best.cost <= 1.0
    assert best.is_within_tolerance
    assert best.not_tried


def test_no_policy_claims_to_save_bytes_that_it_does_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))
    best = castwise.tune(model, batches(), loss=F.cross_entropy, cost="bytes", tolerance=1e-7)

    def nbytes(policy: Policy) -> float:
        counts: dict[Any, float] = {}
        bound = policy.bind(model)
        with Watch(model) as watch, watch.handling(OutputBytes(counts).call), castwise.autocast("cpu", policy=bound):
            model(batches()[0][0])
        bound.unbind()
        return sum(counts.values())

    assert len(best.frontier.points) > 1
    for point in best.frontier.points:
        assert nbytes(point.policy) / nbytes(Policy(compute="float32")) <= point.cost * (1 + 1e-9)


@pytest.mark.parametrize("cost", ["bytes", "measured"])
def test_modules_that_compute_in_the_dtype_of_their_inputs_are_not_chosen_for(cost: str) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 4))
    best = castwise.tune(model, batches(), loss=F.cross_entropy, cost=cost)  # type: ignore[arg-type]
    assert set(best.formats) == {"0", "3"}


def test_formats_that_overflow_are_not_chosen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].bias.add_(1e5)
    best = castwise.tune(model, batches(), loss=F.cross_entropy, tolerance=0.5)
    assert best.is_within_tolerance
    assert best.formats["0"] != "float16"


def test_everything_is_put_back_also_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)).train()
    given, state = batches(), torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def check() -> None:
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)
        assert not any("forward" in vars(module) for module in model.modules())
        assert all(param.grad is None for param in model.parameters())

    for cost in ("flops", "bytes", "measured"):
        castwise.tune(model, given, loss=F.cross_entropy, cost=cost)  # type: ignore[arg-type]
        check()
    calls = []

    def interrupted(output: Tensor, target: Tensor) -> Tensor:
        calls.append(output)
        if len(calls) == 15:
            raise KeyboardInterrupt
        return F.cross_entropy(output, target)

    with pytest.raises(KeyboardInterrupt):
        castwise.tune(model, given, loss=interrupted)
    check()


def test_a_policy_that_was_bound_stays_bound() -> None:
    model = Model()
    bound = Policy(compute="bfloat16").bind(model), Policy(compute="bfloat16", modules={"head": "float32"}).bind(model)
    for tolerance in (0.5, 2e-4):
        castwise.tune(model, batches(), loss=F.cross_entropy, formats=("bfloat16", "float32"), tolerance=tolerance)
    assert all(each.is_bound for each in bound)


def test_weights_in_bf16_are_judged_by_a_reference_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castwise.comparison._precision_drift.is_native_here", lambda dtype: True)
    model = Model().bfloat16()
    given = [(x.bfloat16(), target) for x, target in batches()]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.float(), target)

    best = castwise.tune(model, given, loss=loss, formats=("bfloat16", "float32"), tolerance=1e-9)
    assert best.error > 0
    assert not best.is_within_tolerance
    assert best.notes == ()  # a module in float32 computes with its weights in fp32
    assert all(param.dtype is torch.bfloat16 for param in model.parameters())


class Counted(nn.Linear):
    """Counts its calls, in forwards: a backward costs two."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        def add(count: int) -> None:
            Counted.forwards += count

        add(1)
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda gradient: add(2))
        return output


@pytest.mark.parametrize("tolerance", [0.5, 1e-4, 1e-9])
@pytest.mark.parametrize("formats", [("bfloat16", "float32"), ("float16", "bfloat16", "float32")])
@pytest.mark.parametrize("layers", [1, 2, 3, 10])
def test_runs_are_at_most_three_forwards_and_backwards_for_each_module(
    layers: int, formats: tuple[str, ...], tolerance: float
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Counted(8, 8) for _ in range(layers - 1)), Counted(8, 4))
    for count in (2, 3):
        Counted.forwards = 0
        castwise.tune(model, batches(count), loss=F.cross_entropy, formats=formats, tolerance=tolerance)
        assert Counted.forwards / layers / count <= 3 * 3 * layers


def test_modules_that_only_held_out_batches_call_are_not_listed_as_never_called() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor, which: int) -> Tensor:
            return (self.second if which else self.first)(x)  # type: ignore[no-any-return]

    given = [((x, which), target) for (x, target), which in zip(batches(), (0, 1, 0, 1), strict=True)]
    best = castwise.tune(Two(), given, loss=F.cross_entropy, tolerance=0.5)
    assert best.not_called == ("third",)
    assert "formats for modules that only held-out batches call: second" in best.not_tried


def test_bad_input_is_refused_with_what_to_do() -> None:
    tune: Any = castwise.tune
    model, given = Model(), batches()
    with pytest.raises(ValueError, match="at least two batches, because every second one is held out, got one"):
        tune(model, given[:1], loss=F.cross_entropy)
    with pytest.raises(ValueError, match="got 'float8'; did you mean 'float32' or 'float16'"):
        tune(model, given, loss=F.cross_entropy, formats=("float8",))
    with pytest.raises(ValueError, match=r"formats must be some of .* got 'float16'"):
        tune(model, given, loss=F.cross_entropy, formats="float16")
    with pytest.raises(ValueError, match="cost must be one of 'flops', 'bytes', 'measured', got 'flop'; did you mean"):
        tune(model, given, loss=F.cross_entropy, cost="flop")
    with pytest.raises(ValueError, match="tolerance must be a finite number > 0, got 0"):
        tune(model, given, loss=F.cross_entropy, tolerance=0)
    with pytest.raises(ValueError, match="tolerance must be a finite number > 0, got True"):
        tune(model, given, loss=F.cross_entropy, tolerance=True)
    with pytest.raises(ValueError, match="formats must include one other than 'float32'"):
        tune(model, given, loss=F.cross_entropy, formats=("float32",))
    with pytest.raises(ValueError, match=r"formats must be some of .* got torch.bfloat16"):
        tune(model, given, loss=F.cross_entropy, formats=torch.bfloat16)
    with pytest.raises(ValueError, match="no module that was called has any flops to save"):
        tune(nn.Sequential(nn.LayerNorm(8)), given, loss=lambda y, t: y.square().mean())
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"is nan in the reference(.|\n)*head.weight is nan at"):
        tune(model, given, loss=F.cross_entropy)


@pytest.mark.parametrize("seed", range(12))
def test_the_cost_is_near_to_that_of_the_best_of_all_policies(seed: int) -> None:
    case = small_models.case(seed, layers=(3, 4))
    best = castwise.tune(case.model, case.batches, loss=case.loss, tolerance=case.tolerance)
    assert best.is_within_tolerance
    assert max(small_models.errors(case, best.policy)) <= case.tolerance * (1 + 1e-6)
    assert best.cost <= 1.05 * small_models.cheapest(case)


def test_rules_name_only_what_differs_from_the_module_around() -> None:
    search = precision_search.Search(Model(), F.cross_entropy, None)
    choice = {"": "float32", "qkv": "bfloat16", "head": "bfloat16"}
    policy = search._policy(choice)
    assert policy == Policy(compute="bfloat16", modules={"": "float32", "qkv": "bfloat16", "head": "bfloat16"})
    assert dict(search._policy({"qkv": "bfloat16", "head": "float32"}).modules) == {"head": "float32"}


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_format_that_the_model_does_not_run_in_is_left_out_and_named(error: type[Exception]) -> None:
    class RefusesHalf(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            if output.dtype is torch.float16:
                raise error("no kernel for Half")
            return output

    model = nn.Sequential(RefusesHalf(8, 8), nn.Linear(8, 4))
    best = castwise.tune(model, batches(), loss=F.cross_entropy)
    assert best.policy == Policy(compute="bfloat16")
    assert f"float16: the model cannot be run: {error.__name__}: no kernel for Half" in best.not_tried
    with pytest.raises(ValueError, match="the model runs in no format except float32; float16: cannot be run"):
        castwise.tune(model, batches(), loss=F.cross_entropy, formats=("float16", "float32"))


@pytest.mark.parametrize("place", [2, 3])
def test_a_batch_that_is_not_finite_in_the_reference_is_found_wherever_it_is(place: int) -> None:
    given = batches()
    given[place] = torch.full((16, 8), float("nan")), given[place][1]
    with pytest.raises(ValueError, match=rf"the loss of batches\[{place}\] is nan in the reference(.|\n)*nan") as found:
        castwise.tune(Model(), given, loss=F.cross_entropy)
    assert len(str(found.value).splitlines()) > 1  # the diagnosis


def test_modules_that_run_without_gradients_are_not_taken_for_free() -> None:
    best = castwise.tune(
        planted.FrozenEncoder(), batches(), loss=F.cross_entropy, formats=("bfloat16", "float32"), tolerance=0.5
    )
    assert best.formats == {"encoder": "float32", "head": "bfloat16"}
    assert any("encoder runs under torch.no_grad()" in note for note in best.notes)
    assert "lower formats for modules with an unknown effect: encoder" in best.not_tried


def test_formats_may_be_an_iterator() -> None:
    assert tuned(0.5, formats=iter(("bfloat16", "float32"))).policy == Policy(compute="bfloat16")


@pytest.mark.parametrize("cost", ["flops", "bytes", "measured"])
def test_modules_that_only_a_later_search_batch_calls_are_chosen_for(cost: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor, which: int) -> Tensor:
            return (self.second if which else self.first)(x)  # type: ignore[no-any-return]

    given = [((x, which), target) for (x, target), which in zip(batches(), (0, 0, 1, 1), strict=True)]
    best = castwise.tune(Two(), given, loss=F.cross_entropy, cost=cost, tolerance=0.5)  # type: ignore[arg-type]
    assert set(best.formats) == {"first", "second"}
    if cost == "flops":
        assert best.cost == 0.5


def test_the_modules_that_have_rules_are_printed() -> None:
    best = tuned(2e-4)
    for chosen in set(best.policy.modules.values()):
        names = [name or "(root)" for name, each in best.policy.modules.items() if each == chosen]
        assert f"\nin {chosen}: {', '.join(names)}\n" in str(best)
    assert "head" in str(best).partition("cost")[0]
