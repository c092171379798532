"""One rank of a comparison of a sharded model, beside the same model as it is; prints what was found as JSON."""

from __future__ import annotations

import copy
import json
import sys

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own spelling
from tests.distributed.ranks import join
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import castwise

rank, world_size, what = join(sys.argv)
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 4))
if what == "fsdp1":
    refusals = []
    for use_orig_params in (False, True):
        wrapped = FullyShardedDataParallel(
            copy.deepcopy(plain), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        batches = [(torch.randn(6, 8), torch.arange(6) % 4)] * 2
        for model in (wrapped, nn.Sequential(wrapped)):
            try:
                castwise.tune(model, batches, loss=F.cross_entropy)
            except ValueError as error:
                refusals.append(str(error))
    print(json.dumps(refusals))
    torch.distributed.destroy_process_group()
    sys.exit()
model = copy.deepcopy(plain)
fully_shard(model[2])
fully_shard(model)
x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
batch = x, torch.arange(6) % 4
before = [param.to_local().clone() for param in model.parameters()]
policy = {"bf16": castwise.policies.bf16}
refusal = ""
try:
    castwise.tune(model, [batch] * 2, loss=F.cross_entropy)
except ValueError as error:
    refusal = str(error)
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
            "tune": refusal,
        }
    )
)
torch.distributed.destroy_process_group()
