"""`Agreement` by itself, of ranks that are threads; `test_agreement.py` has scalers, in processes."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.amp.ranks_in_threads import Collective, Group, Mesh, World

from castwise.amp import _agreement as agreement
from castwise.amp import _disagreement as disagreement
from castwise.amp._agreement import Agreement
from castwise.amp._schedules import Dynamic

SUM, MAX = ("sum", torch.float64, 8, "cpu"), ("max", torch.float64, 8, "cpu")
BY_NORM_TYPE = {1.0: [SUM], 2.0: [SUM], 4.0: [SUM], 4.5: [MAX, SUM], 20.0: [MAX, SUM], math.inf: [MAX]}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], World]:
    return lambda size: World(size, monkeypatch)


def flags(*set_ones: int, of: int, value: float = 1.0) -> list[torch.Tensor]:
    return [torch.full((1,), value * (position in set_ones)) for position in range(of)]


def numbers(tensors: list[torch.Tensor]) -> list[float]:
    return torch.cat([tensor.reshape(1) for tensor in tensors]).tolist()


def fact(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def agreed(ranks: Any = None, **settings: Any) -> Agreement:
    return Agreement(ranks, "cpu", **settings)


# Flags


@pytest.mark.parametrize("size", [2, 3, 4])
def test_six_flags_fit_in_a_collective(world: Callable[[int], World], size: int) -> None:
    for count, collectives in ((1, 1), (6, 1), (7, 2), (12, 2), (13, 3)):
        of = world(size)

        def meet(rank: int, count: int = count) -> list[float]:
            agreed().any_(found := flags(*range(count), of=count), "step")
            return numbers(found)

        assert of.run(meet) == [[1.0] * count] * size
        assert of.collectives == [Collective(*SUM)] * collectives


def test_a_rank_alone_has_no_collectives(world: Callable[[int], World]) -> None:
    of = world(1)

    def meet(rank: int) -> Any:
        ranks = agreed()
        ranks.any_(found := flags(1, of=2), "step")
        return numbers(found), [ranks.norm(fact(3.0), norm_type, "clip").item() for norm_type in BY_NORM_TYPE]

    assert of.run(meet) == [([0.0, 1.0], [3.0] * len(BY_NORM_TYPE))]
    assert of.collectives == []


@pytest.mark.parametrize("size", [1, 2, 1000, 100_000, 2**20])
def test_a_sum_of_squares_of_any_digest_is_exact(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(agreement.zlib, "crc32", lambda *_: 2**32 - 1)
    monkeypatch.setattr(Agreement, "size", lambda _: size)
    _, digest, _ = agreed()._describe("step")
    assert size * digest**2 < 2**53
    assert digest > 2**10


@pytest.mark.parametrize("count", [1, 2, 6, 7, 20])
@pytest.mark.parametrize("value", [1.0, 2.0])
def test_a_flag_is_set_everywhere_that_is_set_on_one(world: Callable[[int], World], count: int, value: float) -> None:
    def meet(rank: int) -> list[list[float]]:
        ranks, results = agreed(), []
        for position in range(count):
            found = flags(*([position] if rank == position % 3 else []), of=count, value=value)
            ranks.any_(found, "step")
            results.append(numbers(found))
        return results

    expected = [[float(position == other) for other in range(count)] for position in range(count)]
    assert world(3).run(meet) == [expected] * 3


def test_nothing_is_said_of_no_flags(world: Callable[[int], World]) -> None:
    of = world(2)
    assert of.run(lambda rank: agreed().any_([], "step")) == [None, None]
    assert of.collectives == []


# Norms


@pytest.mark.parametrize("norm_type", list(BY_NORM_TYPE))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_is_that_of_all_ranks(world: Callable[[int], World], norm_type: float, dtype: torch.dtype) -> None:
    pairs = ((3.0, 4.0), (0.0, 0.0), (0.0, 1e-30), (1e30, 1e30), (2.0**-40, 1.0))
    for norms in pairs:
        of = world(2)
        results = of.run(lambda rank, norms=norms: agreed().norm(fact(norms[rank], dtype), norm_type, "clip"))
        largest = max(norms) or 1.0
        expected = max(norms)
        if norm_type != math.inf:
            expected = largest * sum((norm / largest) ** norm_type for norm in norms) ** (1 / norm_type)
        for norm in results:
            assert norm.shape == ()
            torch.testing.assert_close(norm.item(), expected, rtol=1e-6, atol=0.0)
        assert torch.equal(*results)
        assert of.collectives == [Collective(*each) for each in BY_NORM_TYPE[norm_type]]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 4.5])
def test_what_all_ranks_hold_counts_once(world: Callable[[int], World], norm_type: float) -> None:
    norms = world(4).run(lambda rank: agreed().norm(fact(3.0, torch.float64), norm_type, "clip", share=0.25))
    assert [norm.item() for norm in norms] == pytest.approx([3.0] * 4)


@pytest.mark.parametrize("norm_type", list(BY_NORM_TYPE))
@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_stays_so(world: Callable[[int], World], norm_type: float, odd: float) -> None:
    for norms in ((odd, 1.0), (1.0, odd)):
        results = world(2).run(lambda rank, norms=norms: agreed().norm(fact(norms[rank]), norm_type, "clip"))
        assert not any(norm.isfinite() for norm in results)


def test_a_power_that_fp64_cannot_hold_is_infinite(world: Callable[[int], World]) -> None:
    norms = world(2).run(lambda rank: agreed().norm(fact(1e200, torch.float64), 2.0, "clip"))
    assert [norm.item() for norm in norms] == [math.inf] * 2


@pytest.mark.parametrize("odd", [None, math.inf, math.nan])
def test_maxima_are_those_of_all_ranks(world: Callable[[int], World], odd: float | None) -> None:
    of = world(2)

    def meet(rank: int) -> list[float]:
        second = odd if odd is not None and rank else 1e30
        return numbers(agreed().maxima([fact(float(rank)), fact(second)], "update"))

    assert of.run(meet) == [[1.0, pytest.approx(1e30) if odd is None else math.inf]] * 2
    assert of.collectives == [Collective(*MAX)]


# Ranks that do not do the same


def tell(rank: int, odd: Callable[[Agreement], Any], call: str = "step", norm_type: float | None = None) -> Any:
    ranks = agreed()
    ranks.start(4.0, 7.0)
    ranks.note_call("scale", 2)
    if rank == 1:
        odd(ranks)
    ranks.note_call("step")
    if norm_type is not None:
        return ranks.norm(fact(1.0), norm_type, call)
    found = flags(2, of=3)
    try:
        return ranks.any_(found, call)
    finally:
        assert numbers(found) == [0.0, 0.0, 1.0]


ODD: dict[str, tuple[Callable[[Agreement], Any], str, str]] = {
    "another start": (lambda ranks: ranks.start(4.0, 8.0), "call 2 after 0", "call 1 after 0"),
    "another call": (lambda ranks: ranks.note_call("scale", 2), "call 2 after 0", "call 3 after 0"),
    "an update": (lambda ranks: ranks.note_update(None), "call 2 after 0", "call 1 after 1"),
    "two updates": (
        lambda ranks: (ranks.note_update(None), ranks.note_update(2.0)),
        "call 2 after 0",
        "call 1 after 2",
    ),
}


@pytest.mark.parametrize("norm_type", [None, 2.0, 4.5, math.inf])
@pytest.mark.parametrize("name", list(ODD))
def test_all_ranks_learn_who_does_what(world: Callable[[int], World], name: str, norm_type: float | None) -> None:
    odd, usual, other = ODD[name]
    errors = world(3).run(lambda rank: tell(rank, odd, norm_type=norm_type))
    assert len({str(error) for error in errors}) == 1
    what, *views = str(errors[0]).split("; ")
    first, second = (f"step{' for 3' if norm_type is None else ''}, {each} updates" for each in (usual, other))
    start = (
        "the ranks no longer use their scalers in the same way, so none of them has stepped: create, load, step and "
        f"update scalers in the same way on all ranks. ranks [0, 2] report: {first} (history "
    )
    assert what.startswith(start)
    assert len(what) == len(start) + 8 + 1
    (view,) = views
    assert view.startswith(f"ranks [1] report: {second} (history ")
    assert view[-9:] != what[-9:]


@pytest.mark.parametrize("norm_type", [None, 2.0, 4.5, math.inf])
def test_ranks_are_found_out_that_make_another_call_now(world: Callable[[int], World], norm_type: float | None) -> None:
    errors = world(2).run(
        lambda rank: tell(rank, lambda ranks: None, call=("step", "unscale_")[rank], norm_type=norm_type)
    )
    for error in errors:
        assert "ranks [0] report: step" in str(error)
        assert "ranks [1] report: unscale_" in str(error)


@pytest.mark.parametrize("counts", [(1, 2), (2, 3), (6, 5)])
def test_ranks_are_found_out_that_have_more_optimizers(world: Callable[[int], World], counts: tuple[int, int]) -> None:
    errors = world(2).run(lambda rank: agreed().any_(flags(of=counts[rank]), "step"))
    for error in errors:
        for rank, count in enumerate(counts):
            assert f"ranks [{rank}] report: step for {min(count, 6)}, call 0 after 0 updates" in str(error)


@pytest.mark.parametrize("many", range(1, 5))
def test_histories_are_of_what_was_done_and_in_which_order(world: Callable[[int], World], many: int) -> None:
    calls = [("scale",), ("scale", 1), ("unscale_", "1"), ("step", None)][:many]

    def meet(rank: int, order: list[tuple[Any, ...]]) -> Any:
        ranks = agreed()
        for call in order if rank else calls:
            ranks.note_call(*call)
        return ranks.any_(flags(of=1), "step")

    assert world(2).run(lambda rank: meet(rank, calls)) == [None, None]
    if many > 1:
        assert all(
            "the ranks no longer use their scalers" in str(each)
            for each in world(2).run(lambda rank: meet(rank, calls[::-1]))
        )


@pytest.mark.parametrize("scales", [(2.0, 4.0), (None, 4.0)])
def test_an_update_that_sets_the_scale_is_part_of_the_history(
    world: Callable[[int], World], scales: tuple[float | None, float]
) -> None:
    def meet(rank: int, same: bool) -> Any:
        ranks = agreed()
        ranks.note_update(scales[0 if same else rank])
        return ranks.any_(flags(of=1), "step")

    assert world(2).run(lambda rank: meet(rank, True)) == [None, None]
    assert all(
        "the ranks no longer use their scalers" in str(each) for each in world(2).run(lambda rank: meet(rank, False))
    )


def test_a_start_is_part_of_the_history(world: Callable[[int], World]) -> None:
    def meet(rank: int) -> Any:
        ranks = agreed()
        ranks.start(4.0, 2.0 + rank)
        return ranks.any_(flags(of=1), "step")

    assert all("the ranks no longer use their scalers" in str(each) for each in world(2).run(meet))


def test_a_new_start_ends_what_ranks_did_apart(world: Callable[[int], World]) -> None:
    def meet(rank: int) -> Any:
        ranks = agreed()
        for _ in range(rank):
            ranks.note_update(None)
            ranks.note_call("scale")
        ranks.start(2.0)
        return ranks.any_(flags(of=1), "step")

    assert world(2).run(meet) == [None, None]


def test_a_rank_that_leaves_out_a_whole_iteration_raises_nothing_and_the_others_wait(
    world: Callable[[int], World],
) -> None:
    of = world(2)
    of.world.meets = threading.Barrier(2, timeout=0.3)

    def meet(rank: int) -> Any:
        ranks, agreed_on = agreed(), 0
        for _ in range(3 - rank):  # as after a rank's accumulation without a step
            try:
                ranks.any_(flags(of=1), "step")
            except RuntimeError as error:
                return agreed_on, type(error.__cause__ or error)
            ranks.note_update(None)
            agreed_on += 1
        return agreed_on

    assert of.run(meet) == [(2, threading.BrokenBarrierError), 2]


# On an accelerator


class Later:
    """Stands for what is read back of a tensor on a device, when someone waits for it."""

    def __init__(self, given: torch.Tensor) -> None:
        self.given = given

    def wait(self) -> bool:
        return bool(self.given.item())


@pytest.mark.parametrize("differs", [True, False])
def test_a_collective_four_later_raises(world: Callable[[int], World], differs: bool) -> None:
    def meet(rank: int) -> Any:
        ranks = agreed()
        ranks._unchecked.extend((Later(torch.tensor(differs)), f"call {number}") for number in range(3))  # type: ignore[misc]
        ranks.any_(flags(of=1), "step")
        ranks._unchecked.append((Later(torch.tensor(False)), "call 3"))  # type: ignore[arg-type]
        try:
            ranks.any_(flags(of=1), "step")
        except RuntimeError as error:
            return str(error), ranks.any_(flags(of=1), "step")
        assert len(ranks._unchecked) == 3
        return None

    for error in world(2).run(meet):
        assert (error is not None) is differs
        if error is not None:
            assert "ranks [0, 1] report: call 0 (history" in error[0]


class OnADevice(torch.Tensor):
    """A vector that says it is not on a CPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch's is an attribute
        return torch.device("cuda")


@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("differs", [True, False])
def test_on_a_device_nobody_looks_and_no_rank_steps(
    monkeypatch: pytest.MonkeyPatch, is_captured: bool, differs: bool
) -> None:
    monkeypatch.setattr(agreement, "Readback", Later)
    monkeypatch.setattr(agreement, "is_capturing", lambda _: is_captured)
    ranks, head = agreed(), torch.tensor([3.0, 9.0])
    reduced = torch.tensor([4.0 if differs else 3.0, 9.0, 0.0, 1.0]).as_subclass(OnADevice)
    assert numbers(ranks._checked(reduced, head, "step")) == ([math.inf, math.inf] if differs else [0.0, 1.0])
    assert len(ranks._unchecked) == (0 if is_captured else 1)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda ranks: pickle.loads(pickle.dumps(ranks))])
def test_a_copy_has_the_history_and_no_pending_mismatch(twin: Callable[[Agreement], Agreement]) -> None:
    ranks = agreed()
    ranks.note_update(None)
    ranks.note_call("scale")
    ranks._unchecked.append((Later(torch.tensor(True)), "a call"))  # type: ignore[arg-type]
    other = twin(ranks)
    assert other.__dict__ == ranks.__dict__ | {"_unchecked": deque(), "_watched": other._watched}
    assert other._watched is not ranks._watched


def test_a_copy_shares_the_group_and_is_copied_once(world: Callable[[int], World]) -> None:
    ranks = agreed(world(1).world)
    twins = copy.deepcopy([ranks, ranks])
    assert twins[0] is twins[1] is not ranks
    assert twins[0].ranks is ranks.ranks
    with pytest.raises(RuntimeError) as raised:
        pickle.dumps(ranks)
    assert str(raised.value) == (
        "a process group cannot be pickled, and so neither can a scaler that has one: save its state_dict()"
    )


# Groups


def test_a_group_that_cannot_be_reached_is_named(world: Callable[[int], World]) -> None:
    of, group = world(3), Group(0, 2, name="pair")
    of.fault = RuntimeError("Connection closed by peer")
    errors = of.run(lambda rank: None if rank == 1 else agreed(group).any_(flags(of=1), "step"))
    for rank, error in ((0, errors[0]), (2, errors[2])):
        assert str(error) == (
            f"rank {rank} could not agree with the other ranks of process group 'pair' on whether to take step 1, so "
            "it has not stepped: check whether a rank has ended, left out a call or disabled its scaler. "
            "ranks [0, 2] report: step for 1, call 0 after 0 updates. Connection closed by peer"
        )
        assert error.__cause__ is of.fault


def fail(of: World, size: int, monkeypatch: pytest.MonkeyPatch, *, at: tuple[int, ...]) -> list[str]:
    """The errors of some ranks of a large group, whose collective fails."""
    of.fault = RuntimeError("Connection closed by peer. " + "x" * 5000)
    monkeypatch.setattr(disagreement, "ANSWER_S", 0.3)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: list(range(size)))

    def meet(rank: int) -> Any:
        ranks = agreed()
        for _ in range(16):
            ranks.note_update(None)
        return ranks.any_(flags(of=1), "step" * (1000 if rank == 1 else 1)) if rank in at else None

    return [str(error) for error in of.run(meet) if error is not None]


@pytest.mark.parametrize("size", [4, 1000])
def test_ranks_that_do_not_answer_are_named_with_the_step(
    world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    missing = "ranks [2, 3]" if size == 4 else "ranks [2, 3, 4, 5, 6, 7, 8, 9, 10, 11] and 988 more"
    for error in fail(world(4), size, monkeypatch, at=(0, 1)):
        assert "whether to take step 17, so it has not stepped" in error
        assert "ranks [0] report: step for 1, call 0 after 16 updates; ranks [1] report: stepstep" in error
        silent = f"; no report within 0.3 s from {missing}, which ended, hang or have not noticed it yet"
        assert f"{silent}. Connection closed by peer" in error
        assert len(error) < 2048


def test_a_rank_that_dies_while_it_reports_hides_no_other_report(
    world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = world(4)
    store = torch.distributed.PrefixStore("castwise/failures", ranks.world.store)
    store.add("count", 1)  # rank 3 was counted, and died
    for error in fail(ranks, 4, monkeypatch, at=(0, 1)):
        assert "ranks [0] report: step for 1, call 0 after 16 updates; ranks [1] report: stepstep" in error
        assert "; no report within 0.3 s from ranks [2, 3], which ended" in error


def test_of_many_ranks_only_the_first_to_fail_read_all_reports(
    world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disagreement, "_READERS", 1)
    errors = fail(world(3), 100_000, monkeypatch, at=(0, 1, 2))
    assert sorted("see the errors of the first 1" in error for error in errors) == [False, True, True]
    assert sum("2 of 100000 ranks failed" in error or "3 of 100000 ranks failed" in error for error in errors) == 2
    (first,) = [error for error in errors if "no report within" in error]
    assert "no report within 0.3 s from ranks [3, 4, 5, 6, 7, 8, 9, 10, 11, 12] and 99987 more" in first


def test_a_store_that_is_gone_hides_no_failure(world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "get_group_store", lambda _: (_ for _ in ()).throw(RuntimeError("Broken pipe")))
    (error,) = fail(world(2), 2, monkeypatch, at=(0,))
    assert "ranks [0] report: step for 1, call 0 after 16 updates; reports of others cannot be reached" in error


def test_a_mismatch_of_a_hundred_thousand_ranks_takes_two_kilobytes(
    world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    size, of = 100_000, world(1)
    what = {rank: f"step with {'x' * 900}, call {rank % 9}" for rank in range(40, 77)}

    def gather(gathered: list[Any], given: Any, group: Any) -> None:
        gathered[:] = [[(rank, what.get(rank, given[0][1]))] for rank in range(size)]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: size)
    (error,) = of.run(lambda _: agreed()._raise("step, call 0 after 16 updates"))
    assert "ranks [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] and 99953 more report: step, call 0 after 16 updates" in str(error)
    assert "ranks [40, 49, 58, 67, 76] report: step with xxx" in str(error)
    assert len(str(error)) < 2048


def test_a_rank_that_ends_during_the_exchange_does_not_hide_the_mismatch(
    world: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    of = world(2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    errors = of.run(lambda rank: agreed().any_(flags(of=1), ("step", "unscale_")[rank]))
    for rank, error in enumerate(errors):
        assert str(error).startswith(
            "the ranks no longer use their scalers in the same way, so none of them has stepped"
        )
        assert f"ranks [{rank}] report: {('step', 'unscale_')[rank]} for 1, call 0 after 0 updates" in str(error)
        assert str(error).endswith("; the others could not be asked: Connection closed by peer")


@pytest.mark.parametrize(
    ("wanted", "there", "used"), [("cpu", ["cpu"], "cpu"), ("meta", ["cpu"], "cpu"), ("cpu", ["meta", "cpu"], "cpu")]
)
def test_a_collective_takes_place_where_the_group_can(
    world: Callable[[int], World], wanted: str, there: list[str], used: str
) -> None:
    of = world(2)
    of.world.device_types = there
    found = of.run(lambda rank: Agreement(None, wanted).norm(fact(3.0), 1.0, "clip"))
    assert [norm.item() for norm in found] == [6.0, 6.0]
    assert of.collectives == [Collective("sum", torch.float64, 8, used)]


def test_facts_are_taken_to_the_device_of_the_group(world: Callable[[int], World]) -> None:
    of = world(2)
    of.world.device_types = ["meta"]  # holds no values, so none come back
    errors = of.run(lambda rank: agreed().norm(fact(3.0), 1.0, "clip"))
    assert of.collectives == [Collective("sum", torch.float64, 8, "meta")]
    assert all(isinstance(error, NotImplementedError) for error in errors)


def test_a_mesh_of_some_ranks_is_reduced_along_its_dimensions(world: Callable[[int], World]) -> None:
    of = world(5)  # the last is outside of the mesh
    rows, columns = [Group(0, 1), Group(2, 3)], [Group(0, 2), Group(1, 3)]

    def meet(rank: int) -> Any:
        if rank == 4:
            return None
        ranks = agreed(Mesh(lambda: [rows[rank // 2], columns[rank % 2]], (2, 2), ("x", "y")))
        ranks.any_(found := flags(*([1] if rank == 3 else []), of=2), "step")
        norm = ranks.norm(fact(rank + 1.0), 1.0, "clip")
        return numbers(found), norm.item(), ranks.size(), ranks.is_of_all_ranks()

    assert of.run(meet) == [([0.0, 1.0], 10.0, 4, False)] * 4 + [None]
    assert len(of.collectives) == 4


def test_ranks_of_a_mesh_that_differ_are_all_named(world: Callable[[int], World]) -> None:
    of = world(5)
    rows, columns = [Group(0, 1), Group(2, 3)], [Group(0, 2), Group(1, 3)]

    def meet(rank: int) -> Any:
        if rank == 4:
            return None
        ranks = agreed(Mesh(lambda: [rows[rank // 2], columns[rank % 2]], (2, 2), ("x", "y")))
        return ranks.any_(flags(of=1), "unscale_" if rank == 2 else "step")

    for error in of.run(meet)[:4]:
        assert "ranks [0, 1, 3] report: step for 1" in str(error)
        assert "ranks [2] report: unscale_ for 1" in str(error)


def test_a_mesh_of_all_ranks_is_reduced_at_once(world: Callable[[int], World]) -> None:
    of = world(4)
    mesh = Mesh(lambda: pytest.fail("its dimensions are not needed"), (2, 2), ("x", "y"))
    results = of.run(lambda rank: (agreed(mesh).any_(flags(of=1), "step"), agreed(mesh).is_of_all_ranks()))
    assert results == [(None, True)] * 4
    assert len(of.collectives) == 1


@pytest.mark.parametrize(
    ("shape", "names", "copies"),
    [
        ((2, 3), ("replicate", "shard"), 2),
        ((2, 3), ("x", "y"), 1),
        ((2, 3, 4), ("dp_replicate", "replicate", "tp"), 6),
        ((), (), 1),
        ((4,), None, 1),
    ],
)
def test_copies_are_what_a_mesh_calls_so(shape: tuple[int, ...], names: Any, copies: int) -> None:
    assert agreed(Mesh(list, shape, names)).copies() == copies


def test_a_group_has_no_copies(world: Callable[[int], World]) -> None:
    assert agreed().copies() == 1
    assert agreed(world(2).world).copies() == 1


@pytest.mark.parametrize(("stages", "ranks"), [(1, 6), (2, 3), (6, 1)])
def test_stages_have_as_many_ranks(world: Callable[[int], World], stages: int, ranks: int) -> None:
    assert world(6).run(lambda _: agreed(stages=stages).ranks_of_a_stage()) == [ranks] * 6


def test_stages_that_do_not_come_out_even_are_refused(world: Callable[[int], World]) -> None:
    for error in world(6).run(lambda _: agreed(stages=4).ranks_of_a_stage()):
        assert isinstance(error, ValueError)
        assert str(error) == "pipeline_stages must divide the number of ranks, 6, got 4"


class Dummy:
    """What stands for a group where there is none, as in torch's own tests."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_anything_of_one_rank_is_a_group() -> None:
    ranks = agreed(Dummy())
    ranks.any_(found := flags(0, of=2), "step")
    assert numbers(found) == [1.0, 0.0]
    assert ranks.norm(fact(3.0), 2.0, "clip") == 3.0
    assert ranks.ranks_of_a_stage() == 1
    assert not ranks.is_of_all_ranks()


def test_a_rank_outside_of_its_group_raises(world: Callable[[int], World]) -> None:
    of, outside = world(2), torch.distributed.GroupMember.NON_GROUP_MEMBER
    assert of.run(lambda rank: agreed(outside).is_of_all_ranks()) == [False, False]
    for rank, error in enumerate(of.run(lambda rank: agreed(outside).any_(flags(of=1), "step"))):
        text = f"rank {rank} is not in the process group of its scaler: use the scaler only on ranks of the group"
        assert str(error) == text


def test_ranks_are_needed_when_they_are_to_agree() -> None:
    ranks = agreed()
    assert not ranks.is_of_all_ranks()
    with pytest.raises(RuntimeError) as raised:
        ranks.any_(flags(of=1), "step")
    assert isinstance(raised.value, ValueError)  # as torch's is, whose words come first
    assert str(raised.value).endswith(" ranks cannot agree yet: call torch.distributed.init_process_group() first")


@pytest.mark.parametrize(
    ("ranks", "stages", "error", "text"),
    [
        (3, 1, TypeError, "process_group must be a ProcessGroup or a DeviceMesh, got int"),
        (None, 0, ValueError, "pipeline_stages must be an integer >= 1, got 0"),
        (None, 1.5, TypeError, "pipeline_stages must be an integer, got 1.5 of type float"),
    ],
)
def test_wrong_arguments_are_refused(ranks: Any, stages: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        agreed(ranks, stages=stages)
    assert str(raised.value) == text


def test_torch_without_distributed_has_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(RuntimeError) as raised:
        agreed()
    assert str(raised.value) == "this build of torch has no torch.distributed, so there are no ranks to agree with"


@pytest.mark.parametrize("setting", ["growth_interval=7", "hysteresis=2", "cooldown=3", "max_scale=64.0"])
def test_reports_that_are_shortened_show_the_setting_in_which_they_differ(setting: str) -> None:
    settings = dict([setting.split("=")])
    other = Dynamic(4.0, **{name: float(value) if "." in value else int(value) for name, value in settings.items()})
    reports = [
        f"step() with {schedule} for 1, call 2 after 3 updates (history 0123abcd)" for schedule in (Dynamic(4.0), other)
    ]
    assert len(reports[0]) > 280
    shown = disagreement.views_of(enumerate(reports))
    assert shown.count(setting) == 1
    assert shown.count("call 2 after 3 updates") == 2
    assert len(shown) < 2 * 310
