"""Two ranks that train one model: what differs between them is named, and nothing is said of what may differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.forked import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from castwise._digests import digest, digests
from castwise._invariants.board import Board
from castwise._invariants.data_parallel import summed_in_16_bits
from castwise._invariants.equal_ranks import EqualRanks
from castwise._invariants.invariant import Exemptions, Violation
from castwise._invariants.torch_calls import TORCH_CALLS
from castwise._invariants.weights_of_steps import WeightsOfSteps

_FIRST_SCRIPTS = {
    "bypassed": (
        *("gradients-not-reduced", "the gradients of a.weight and 3 more parameters are not the same before the step"),
        "call it, and not the model inside it",
        "If it is intended (local SGD): castwise run --exempt gradients-not-reduced.",
    ),
    "without_the_last_sync": ("gradients-not-reduced", "a.weight", "no_sync() around the last micro-batch"),
    "written_on_one_rank": ("replicas-differ", "b.weight", "equal at step 10, different at step 20"),
    "written_on_one_rank_and_exempt": ("replicas-differ", "a.bias", "equal at step 10, different at step 20"),
    "written_on_one_rank_with_spikes": (
        "replicas-differ",
        "b.weight is not the same on ranks 0 and 1: equal at step 12, different at step 13.",
    ),
    "written_on_one_rank_with_spikes_and_exempt": (
        "replicas-differ",
        "a.bias is not the same on ranks 0 and 1: equal at step 16, different at step 17.",
    ),
    "stepped_on_one_rank_with_spikes": (
        "replicas-differ",
        "a.weight and 3 more parameters are not the same on ranks 0 and 1: equal at step 14, different at step 15.",
    ),
    "unreduced_with_spikes": (
        *("gradients-not-reduced", "equal at step 10, different at step 20; "),
        "; the weights were equal at step 13, different at step 14. The forward of DistributedDataParallel was not",
    ),
    "spikes_on_one_rank_alone": ("replicas-differ", "b.weight", "equal at step 10, different at step 20"),
    "same_batches": ("same-data-on-ranks", "ranks 0 and 1", "DistributedSampler"),
    "replicated_dtensors": ("replicas-differ", "b.weight", "equal at step 10, different at step 20"),
    "sampler_without_its_epoch": ("same-data-on-ranks", "from step 7 on", "sampler.set_epoch(epoch)"),
}


@pytest.fixture(scope="module")
def printed() -> dict[str, list[Any]]:
    of_ranks = on_ranks(2, [Path(__file__).with_name("ranks_worker.py")])
    return dict(json.loads(line) for line in of_ranks[0].splitlines())


@pytest.mark.parametrize("run", _FIRST_SCRIPTS)
def test_what_ranks_break_is_named_within_two_checks(run: str, printed: dict[str, list[Any]]) -> None:
    ((name, step, severity, text),) = printed[run]
    expected, *parts = _FIRST_SCRIPTS[run]
    assert (name, severity) == (expected, "warning")
    assert step <= 30
    assert all(part in text for part in parts), text


def test_a_rank_repeats_its_own_loss_alone(printed: dict[str, list[Any]]) -> None:
    ((*_, text),) = printed["spike_on_one_rank"]
    assert "at step 42, " in text
    assert "Replayed: the batch at the weights of step 17: loss " in text
    ((*_, text),) = printed["spike_of_a_forward_with_a_collective"]
    assert "Not replayed: its allreduce_ needs the other ranks, which do not replay it." in text


def test_of_ranks_that_may_differ_nothing_is_said(printed: dict[str, list[Any]]) -> None:
    correct = {run: broken for run, broken in printed.items() if run.startswith("correct")}
    assert len(correct) == 8
    # An average that is written into the weights is a note.
    assert [each for broken in correct.values() for each in broken if each[2] != "note"] == []


def test_of_four_ranks_all_that_differ_are_counted() -> None:
    of_ranks = on_ranks(4, [Path(__file__).with_name("ranks_worker.py"), "bypassed"])
    (line,) = of_ranks[0].splitlines()
    _, ((name, step, severity, text),) = json.loads(line)
    assert (name, severity) == ("gradients-not-reduced", "warning")
    assert step <= 30
    assert re.match(
        r"the gradients of a[.]weight and 3 more parameters are not the same before the step on ranks 0 and [123], "
        r"and 2 more: different at step 10[.] ",
        text,
    )
    assert [json.loads(of_rank) for of_rank in of_ranks[1:]] == 3 * [["bypassed", []]]


def test_steps_are_known_where_the_first_rank_and_this_one_have_kept_them() -> None:
    def kept(*values: float, begin: int = 1) -> WeightsOfSteps:
        of_steps = WeightsOfSteps()
        for step, value in enumerate(values, begin):
            of_steps.note(step, [torch.ones(3), torch.full((2, 2), value)])
        of_steps.send()
        of_steps.receive()
        return of_steps

    first, other = kept(1.0, 1.0, 2.0, 1.0, 3.0), kept(1.0, 1.0, 5.0, 1.0, 5.0)
    assert other.differ(first.written(), 1, 5) == (2, 3)
    assert other.differ(first.written(), 4, 5) == (4, 5)  # after a check at which they were equal
    assert other.differ(first.written(), 4, 4) == other.differ("", 0, 5) == (0, 0)
    assert [mine == theirs for mine, theirs in zip(first.before(3), other.before(3), strict=True)] == [True, False]
    assert kept(1.0, begin=2).differ(first.written(), 0, 5) == WeightsOfSteps().differ(first.written(), 0, 5) == (0, 0)
    assert kept(7.0).differ(first.written(), 0, 5) == (0, 1)
    assert len(kept(*range(300)).written().split()) == 100
    assert WeightsOfSteps().before(1) == ()


class CountedBoard(Board):
    """A board of a rank that counts the bytes which pass through the store."""

    nbytes = 0

    def write(self, key: str, text: str) -> None:
        self.nbytes += len(key) + len(text)
        Board.write(self, key, text)

    def read(self, key: str) -> str:
        text = Board.read(self, key)
        self.nbytes += len(key) + len(text)
        return text


@pytest.fixture
def thousand_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=1024, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("thousand_ranks")
@pytest.mark.parametrize(
    ("layers", "checks", "checked", "spikes"),
    [(1, 3, range(1024), False), *((8, 12, [0, 1, 511, 512, 1023], spikes) for spikes in (False, True))],
)
def test_of_1024_ranks_each_check_moves_and_keeps_little(
    layers: int, checks: int, checked: Sequence[int], spikes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks of all ranks, or of some for longer, run in turn on one store."""
    store, boards, rank = dist.HashStore(), list[CountedBoard](), 0

    def board(subject: str) -> CountedBoard:
        boards.append(CountedBoard(store, rank, subject))
        return boards[-1]

    monkeypatch.setattr("castwise._invariants.equal_ranks.Board.of_all_ranks", board)
    monkeypatch.setattr("castwise._invariants.equal_ranks.dist.get_rank", lambda: rank)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))))
    optimizer = torch.optim.SGD(model.parameters())
    given = model, lambda: dict(model.module.named_parameters()), optimizer, Exemptions()
    watches = [EqualRanks(*given, each_step=spikes) for _ in checked]
    found: list[Violation] = []
    for step in [10, 20, *range(50, 550, 50)][:checks]:
        for rank, watch in zip(checked, watches, strict=True):
            watch.forward((torch.full((4, 2), float(rank)),), {}, is_checked=True)
            is_apart = rank in (512, 1023) and step == 20
            model.module[0].weight.grad = torch.full((2, 2), 2.0 if is_apart else 1.0)
            for before in range(max(1, step - (9 if step <= 20 else 49)), step + 1):
                watch.note_weights(before)
            found += [*watch.check(step), *watch.after_step(step)]
    rank = 0
    found += watches[0].after_step(600)
    (broken,) = found
    assert broken.name == "gradients-not-reduced"
    assert "on ranks 0 and 512, and 1 more: equal at step 10, different at step 20" in broken.text
    nbytes = sorted(each.nbytes / checks for each in boards)  # whatever the number of ranks and of parameters
    # With spikes the first rank writes 25 characters for each of 100 steps, which one of those that differ reads.
    assert nbytes[-1] < (600.0 + 25 * 100 if spikes else 600.0)
    assert sum(each >= 600.0 for each in nbytes) <= 2 * spikes
    assert max(len(watch._own) for watch in watches) <= 8
    assert max(len(watch._batches) for watch in watches) <= checks
    assert store.num_keys() <= 2 * len(checked) + 4 + spikes


@pytest.fixture
def many_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=128, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("many_ranks")
def test_sums_of_many_ranks_in_16_bits_are_named() -> None:
    TORCH_CALLS.follow()
    try:
        model = DistributedDataParallel(nn.Linear(4, 2))
        assert list(summed_in_16_bits(model)) == []
        model.register_comm_hook(None, fp16_compress_hook)
        (of_hook,) = summed_in_16_bits(model)
    finally:
        TORCH_CALLS.leave()
    assert of_hook.text == (
        "the hook fp16_compress_hook of DistributedDataParallel sums the gradients of 128 ranks in float16, "
        "which keeps 11 bits: small ones get lost."
    )
    (of_dtype,) = summed_in_16_bits(DistributedDataParallel(nn.Linear(4, 2).bfloat16()))
    assert of_dtype.text.startswith("DistributedDataParallel sums the gradients of 128 ranks in bfloat16")
    mesh = init_device_mesh("cpu", (128,))
    sharded = [nn.Linear(128, 128, bias=False) for _ in range(2)]
    fully_shard(sharded[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(sharded[1], mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    (of_fsdp,) = summed_in_16_bits(sharded[0])
    assert of_fsdp.text.startswith("FSDP2 sums the gradients of 128 ranks in bfloat16")
    assert list(summed_in_16_bits(sharded[1])) == []


def test_a_board_waits_for_no_rank_and_numbers_boards_of_one_subject() -> None:
    store = dist.HashStore()
    subjects = ["weights", "weights", "others"]
    boards = {rank: [Board(store, rank, subject) for subject in subjects] for rank in (0, 1)}
    boards[0][0].write("digests", "1 2")
    assert [board.read("digests") for board in boards[1]] == ["1 2", "", ""]
    assert [boards[0][1].count("differ"), boards[1][1].count("differ"), boards[0][1].counted("differ")] == [1, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("length", [1, 3, 8, 40_000])
def test_a_digest_changes_with_each_bit_and_with_places(dtype: torch.dtype, length: int) -> None:
    torch.manual_seed(0)
    values = (100 * torch.randn(length)).relu().to(dtype)
    assert digest(values) == digest(torch.cat([values, values])[length:])  # elsewhere in memory
    of_several = digests([torch.ones(5), values, torch.ones(3)])
    assert torch.equal(of_several, digests([torch.ones(5), torch.cat([values, values])[length:], torch.ones(3)]))
    bits = values.clone().view(torch.uint8)
    for bit in (1, 128):
        bits[-1] ^= bit
        assert digest(bits.view(dtype)) != digest(values)
        others = digests([torch.ones(5), bits.view(dtype), torch.ones(3)])
        assert (others != of_several).tolist() == [False, True, False]
        bits[-1] ^= bit
    if length > 8:
        assert digest(values.roll(1)) != digest(values)
        assert digest(values.view(-1, 8).t()) == digest(values.view(-1, 8).t().contiguous()) != digest(values)
