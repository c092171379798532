"""What ranks have measured, combined in one process as `Reduction` combines it with collectives."""

from __future__ import annotations

import torch

from castwise.monitor._reduction import Packed, joined, layout_of, pack, spans, unpack
from castwise.monitor._sample import Measured


def combined(ranks: list[Measured]) -> Measured:
    layout = joined({rank: layout_of(measured) for rank, measured in enumerate(ranks)})
    of_all = torch.stack([spans(layout, measured) for measured in ranks]).amax(0)
    counts, extremes, sums = zip(*(pack(layout, of_all, measured) for measured in ranks), strict=True)
    together = Packed(torch.stack(counts).sum(0), torch.stack(extremes).amax(0), torch.stack(sums).sum(0))
    return unpack(layout, of_all, together, ranks[0].quantized)
