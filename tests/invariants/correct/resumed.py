# The states of optimizer and scheduler are loaded, and training goes on with the learning rate of the checkpoint.
import copy

import torch

model = torch.nn.Linear(8, 1)


def made() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


optimizer, scheduler = made()
for resumed in (False, True):
    if resumed:
        states = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
        optimizer, scheduler = made()
        optimizer.load_state_dict(states[0])
        scheduler.load_state_dict(states[1])
    for _ in range(3):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
