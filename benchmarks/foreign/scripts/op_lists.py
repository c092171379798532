"""Every op in the lists that torch's own tests of autocast on CPUs go through."""

import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists
from torch.utils._pytree import tree_leaves


def call(name, arguments, options):
    outputs = []
    for namespace in (torch, torch.nn.functional, torch._C._nn, torch.Tensor):
        function = getattr(namespace, name, None)
        if function is None:
            continue
        try:
            result = function(*arguments, **options)
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            outputs.append([(leaf.dtype, leaf.double().sum().item()) for leaf in leaves])
        except Exception as error:  # what it says is part of what is compared
            outputs.append(f"{type(error).__name__}: {error}")
    return outputs


lists = AutocastCPUTestLists(torch.device("cpu"))
for dtype in (torch.bfloat16, torch.float16):
    for kind, entries in vars(lists).items():
        for entry in entries if isinstance(entries, list) else []:
            name, arguments, *rest = entry
            options = next((each for each in rest if isinstance(each, dict)), {})
            torch.manual_seed(0)
            with torch.autocast("cpu", dtype=dtype):
                print(dtype, kind, name, call(name, arguments, options))
