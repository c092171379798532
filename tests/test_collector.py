"""The garbage collector is put back as it was."""

from __future__ import annotations

import gc

import pytest

from castwise._collector import paused


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_rests_meanwhile_and_is_as_it_was_after_an_error(was_enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with pytest.raises(KeyError, match="False"), paused():
            raise KeyError(gc.isenabled())
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()
