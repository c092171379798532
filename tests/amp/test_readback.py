"""`Readback`: a flag on its way to the host."""

from __future__ import annotations

import torch

from castwise.amp.readback import Readback


def test_it_is_what_the_flag_was() -> None:
    assert not Readback([torch.zeros(())], torch.zeros(()))
    assert Readback([torch.ones(())], torch.ones(()))


def test_it_knows_the_flags_it_was_made_from_until_they_change() -> None:
    flags = [torch.zeros(()), torch.zeros(())]
    readback = Readback(flags, flags[0])
    assert readback.is_of(flags)
    assert not readback.is_of(flags[:1])
    assert not readback.is_of([flags[0], torch.zeros(())])
    flags[1].fill_(1.0)
    assert not readback.is_of(flags)
