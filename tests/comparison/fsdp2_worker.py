"""One rank of a comparison of a model of FSDP2 units, beside the same model as it is; prints what was found as JSON."""

from __future__ import annotations

import copy
import json
import sys

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from tests.distributed.ranks import join
from torch import nn
from torch.distributed.fsdp import fully_shard

import castwise

rank, world_size, what = join(sys.argv)
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 4))
model = copy.deepcopy(plain)
fully_shard(model[2])
fully_shard(model)
x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
batch = x, torch.arange(6) % 4
before = [param.to_local().clone() for param in model.parameters()]
policy = {"bf16": castwise.policies.bf16}
drift = castwise.compare(model, [batch], policy, loss=F.cross_entropy)
without = castwise.compare(plain, [batch], policy, loss=F.cross_entropy)["bf16"]
found = drift["bf16"]
after = [param.to_local() for param in model.parameters()]
print(
    json.dumps(
        {
            "problems": [module.problem for module in found.modules if module.problem],
            "is_restored": all(map(torch.equal, before, after)) and all(p.grad is None for p in model.parameters()),
            "effects": [found[name].effect for name in ("0", "2.0", "3")],
            "effects_without": [without[name].effect for name in ("0", "2.0", "3")],
            "cosine": found.summary.gradient_cosine,
        }
    )
)
torch.distributed.destroy_process_group()
