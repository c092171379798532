"""`Flag`: one or several on their way to the host."""

from __future__ import annotations

import torch

from castwise.amp.readback import Flag


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
