"""Checkpointed layers that are computed again with other random numbers."""

from __future__ import annotations

from castwise._mistakes.corrected_code import random_state_preserved
from castwise._mistakes.finder import Finder
from castwise._mistakes.mistake import caller


class Recomputation(Finder):
    """Finds layers with dropout or noise that `torch.utils.checkpoint` computes again without their random state."""

    def will_draw_again(self) -> None:
        """Report the call of `checkpoint`."""
        self.watch.report(
            "recomputed-at-random",
            "with preserve_rng_state=False the backward computes this again with other random numbers, such as another "
            "dropout mask: its gradients are not those of the loss",
            random_state_preserved,
            caller(),
        )
