"""Costs: flops of products by their formulas, each counted for the module whose own code calls it."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from torch import Tensor, nn

from castwise.comparison._watched_calls import Watch
from castwise.tuning._costs import OutputBytes, OwnFlops, of_flops


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.conv, self.norm = nn.Linear(8, 24), nn.Conv1d(8, 4, 3), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
        scores = mixed @ mixed.transpose(1, 2)
        return self.conv((scores @ mixed).transpose(1, 2))  # type: ignore[no-any-return]


def test_flops_are_those_of_each_modules_own_products() -> None:
    model, (batch, tokens) = Block(), (2, 5)
    flops = OwnFlops()
    with Watch(model) as watch, flops.counting, watch.handling(flops.call):
        model(torch.randn(batch, tokens, 8))
    counts = {tap.name: count for tap, count in flops.counts.items() if count}
    assert counts["qkv"] == 2 * batch * tokens * 8 * 24
    assert counts["conv"] == 2 * batch * (tokens - 2) * 4 * 8 * 3
    assert counts[""] == 4 * 2 * batch * tokens * tokens * 8  # attention has two products, and the code two more
    assert "norm" not in counts
    costs = {tap.name: cost for tap, cost in of_flops(flops.counts, ["bfloat16", "float32"]).items()}
    assert costs["qkv"] == {"bfloat16": counts["qkv"] / 2, "float32": counts["qkv"]}


def test_bytes_are_those_of_outputs_and_weights() -> None:
    model, counts = nn.Sequential(nn.Linear(8, 4), nn.Tanh()), {}
    with Watch(model) as watch, watch.handling(OutputBytes(counts).call), torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(3, 8))
    assert {tap.name: count for tap, count in counts.items()} == {"0": 2 * (3 * 4 + 36), "1": 2 * 3 * 4}
