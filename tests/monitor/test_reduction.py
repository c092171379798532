"""What monitors send to each other, in bytes: ranks that are threads of one process, over real gloo groups."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.amp.ranks_in_threads import World

from castwise.monitor import _exchange as exchange
from castwise.monitor._exchange import Exchange, NoExchangeError
from castwise.monitor._exponents import count, tally
from castwise.monitor._ranks import Ranks
from castwise.monitor._reduction import Reduction
from castwise.monitor._sample import GradientTallies, Measured
from castwise.monitor._skips import StepFault
from castwise.monitor._tally import Tally

HEADER = 56
EXPONENTS = 21


class CountingExchange(Exchange):
    """Notes the collectives, with the bytes of their tensor on this rank."""

    def __init__(self) -> None:
        super().__init__("monitor")
        self.collectives: list[tuple[str, int]] = []

    def _wait_for(self, collective: str, options: Any, *tensors: Any, **settings: Any) -> None:
        self.collectives.append((collective, tensors[-1][0].nbytes))
        super()._wait_for(collective, options, *tensors, **settings)

    def take(self) -> list[tuple[str, int]]:
        taken, self.collectives = self.collectives, []
        return taken


def of(*numbers: float) -> Tally:
    return tally(count(torch.tensor(numbers)))


def measured(gradients: int, outputs: int, name: str = "layer") -> Measured:
    """Tallies that all span as many exponents."""
    spread = of(1.0, 2.0 ** (EXPONENTS - 1))
    names = [f"{name}.{number}" for number in range(gradients)]
    return Measured(
        {each: GradientTallies(spread, spread, 1) for each in names},
        activations={f"module.{number}": spread for number in range(outputs)},
        updates={each: [1.0] * 4 for each in names},
    )


@pytest.mark.parametrize(("gradients", "outputs"), [(1, 1), (40, 20), (80, 10)])
@pytest.mark.parametrize("size", [2, 3])
def test_a_sample_sends_the_bytes_of_its_numbers_and_no_names(
    size: int, gradients: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formula of the manual's page on ranks."""

    def sent(_: int) -> list[tuple[str, int]]:
        with_others = CountingExchange()
        Reduction(with_others)(1, measured(gradients, outputs), every=1)
        with_others.close()
        return with_others.collectives

    tallies = 2 * gradients + outputs
    for collectives in World(size, monkeypatch).run(sent):
        assert collectives[:3] == [("gather", HEADER), ("broadcast", HEADER * size), ("allreduce", 8 * tallies)]
        assert [collective for collective, _ in collectives[3:]] == ["reduce"] * 3  # to rank 0
        assert sum(numbers for _, numbers in collectives[3:]) == 8 * tallies * (EXPONENTS + 5) + 48 * gradients


def test_names_are_sent_once_and_only_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(rank: int) -> list[Counter[str]]:
        with_others = CountingExchange()
        reduce, found = Reduction(with_others), []
        for name in ("same", f"of rank {rank}", f"of rank {rank}", "same"):
            reduce(1, measured(2, 1, name), every=1)
            found.append(Counter(collective for collective, _ in with_others.take()))
        with_others.close()
        return found

    for first, second, third, fourth in World(2, monkeypatch).run(sent):
        assert second["broadcast"] == first["broadcast"] + 2  # the names of two ranks
        assert third["broadcast"] == fourth["broadcast"] == first["broadcast"] == 1


def test_a_skip_sends_a_header_and_to_rank_0_the_longest_text(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {0: StepFault("another rank", ()), 1: StepFault("overflow", ("a", "b"))}

    def sent(rank: int) -> tuple[Any, list[tuple[str, int]]]:
        with_others = CountingExchange()
        with_others.all_agree = True
        ranks = Ranks(with_others)
        skips, _ = ranks.gather_faults(1, known[rank], is_sampled=False)
        ranks.close()
        return skips, with_others.collectives

    (on_first, first), (on_second, second) = World(2, monkeypatch).run(sent)
    assert (on_first, on_second) == (known, {1: known[1]})
    assert first == second == [("gather", HEADER), ("broadcast", 2 * HEADER), ("gather", len(b'[["a", "b"], []]'))]


def test_ranks_meet_in_the_default_store_and_use_no_group_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch)

    def meet(rank: int) -> str:
        with_others = Exchange("monitor")
        with with_others.at("sample", 1, [rank]) as headers:
            assert headers == [(0, 0, 0, 0), (1, 0, 0, 0)]
            backend = with_others._group.name()
        with_others.close()
        return str(backend)

    assert world.world.store.num_keys() == 0
    assert world.run(meet) == ["gloo", "gloo"]  # the training's group here has no backend, and raises if it is used
    assert world.world.store.num_keys() > 0
    assert world.collectives == []


@pytest.mark.parametrize("is_one_looking", [False, True])
def test_a_rank_waits_at_most_ten_seconds_for_others(is_one_looking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now, world = [0.0], World(2, monkeypatch)

    def sleep(seconds: float) -> None:
        if is_one_looking and not now[0]:  # a rank that dies while it looks for the missing ones
            ours = torch.distributed.PrefixStore("castwise/monitor", world.world.store)
            torch.distributed.PrefixStore("1", ours).add("came", exchange._STOPPED)
        now[0] += seconds

    monkeypatch.setattr(exchange, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))

    def come(rank: int) -> str:
        if rank == 1:
            return ""
        with pytest.raises(NoExchangeError) as raised:
            Exchange("monitor")
        return str(raised.value)

    why = "some ranks did not come" if is_one_looking else "rank 1 did not come within 9 s"
    assert world.run(come) == [why, ""]
    assert now[0] == pytest.approx(10.0 if is_one_looking else 9.0)


def test_once_it_is_over_no_rank_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_together(rank: int) -> list[str]:
        with_others, whys = CountingExchange(), []
        for step in (1, 2, 3):
            try:
                with with_others.at("sample", step, [1]):
                    if rank == 1:
                        raise OSError("no such device")
                    with_others.maximum(torch.ones(1))
            except NoExchangeError as why:
                whys.append(str(why))
            if step == 1:
                with_others.take()
                with_others._store = None  # neither this nor the group is asked again
        assert with_others.collectives == []
        with_others.close()
        return whys

    for whys in World(2, monkeypatch).run(fail_together):
        assert whys == ["rank 1 failed at step 1: OSError: no such device"] * 3
