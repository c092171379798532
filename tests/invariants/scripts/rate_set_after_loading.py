# broken: resumed-apart by step 2
# The scheduler is made after the optimizer has loaded its state, and sets the first learning rate again.
import copy

import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
model(torch.randn(4, 8)).square().mean().backward()
optimizer.step()
optimizer.zero_grad()
for _ in range(3):
    scheduler.step()
checkpoint = copy.deepcopy(optimizer.state_dict())

optimizer.load_state_dict(checkpoint)
for group in optimizer.param_groups:
    del group["initial_lr"]
    group["lr"] = 1e-2  # as of a script that begins with its own
model(torch.randn(4, 8)).square().mean().backward()
optimizer.step()
