"""`Flag`: one or several on their way to the host."""

from __future__ import annotations

import torch

from castwise.amp._readback import Flag, Readback


def test_it_is_what_the_flag_was() -> None:
    assert not Flag([torch.zeros(())], torch.zeros(()))
    assert Flag([torch.ones(())], torch.ones(()))


def test_it_knows_the_flags_it_was_made_from_until_they_change() -> None:
    flags = [torch.zeros(()), torch.zeros(())]
    flag = Flag(flags, flags[0])
    assert flag.is_of(flags)
    assert not flag.is_of(flags[:1])
    assert not flag.is_of([flags[0], torch.zeros(())])
    flags[1].fill_(1.0)
    assert not flag.is_of(flags)


def test_nobody_waits_for_what_is_on_the_host() -> None:
    there, elsewhere = torch.ones(()), torch.ones((), device="meta")
    assert Readback(there).is_on_host
    assert not Readback(elsewhere).is_on_host
    on_its_way = Readback(there)
    on_its_way._arrived = torch.Event()
    assert not on_its_way.is_on_host


def test_a_flag_that_is_known_is_on_the_host() -> None:
    assert Flag([], torch.ones(())).is_on_host
    flag = Flag([], torch.ones((), device="meta"))
    assert not flag.is_on_host
    flag._known = False
    assert flag.is_on_host
    assert not flag
