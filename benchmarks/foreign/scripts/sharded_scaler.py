"""ShardedGradScaler in one process, with the group that torch's own tests make, on gradients that are good and bad."""

import itertools

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.testing._internal.common_fsdp import DummyProcessGroup


def show(what, compute):
    try:
        print(what, compute())
    except Exception as error:  # what it says is part of what is compared
        print(what, type(error).__name__, error)


def scaled_lists(group):
    scaler = ShardedGradScaler("cpu", init_scale=3.0, process_group=group, enabled=True)
    t0, t1 = torch.full((1,), 4.0), torch.full((1,), 8.0)
    outputs = [t1.clone(), (t0.clone(), t1.clone()), [t0.clone(), (t1.clone(), t0.clone())]]
    return scaler.scale(outputs), scaler.scale(t1), scaler.get_scale()


def found_inf(group, bad):
    scaler = ShardedGradScaler("cpu", init_scale=2.0, process_group=group, enabled=True)
    gradients = [torch.full((10,), 4.0), torch.full((10,), bad)]
    inf, inverse = torch.full((1,), 0.0), torch.full((1,), 0.5)
    parameters = [torch.zeros(10, requires_grad=True) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    found = scaler._unscale_grads_(optimizer, inverse, inf, allow_fp16=True)
    return list(found.values()), [parameter.grad for parameter in parameters]


def stepped(group, bad, fused, options):
    scaler = ShardedGradScaler("cpu", process_group=group, **options)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    for i in range(4):
        scaler.scale(model(torch.ones(1, 3)).sum() * 1e-3).backward()
        if i == 1:
            model.weight.grad[0, 0] = bad
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale(), scaler._get_growth_tracker(), model.weight.tolist()


group = DummyProcessGroup(0, 1)
show("scaled", lambda: scaled_lists(group))
for bad in (8.0, float("inf"), float("nan")):
    show(f"unscaled {bad}", lambda bad=bad: found_inf(group, bad))
choices = (
    (1.0, float("inf"), float("nan")),
    (False, True),
    ({"init_scale": 2.0**16}, {"init_scale": 2.0**96, "growth_factor": 16.0, "growth_interval": 1}),
)
for bad, fused, options in itertools.product(*choices):
    show(f"stepped {bad} {fused} {options}", lambda *_, c=(bad, fused, options): stepped(group, *c))
