# broken: dtype-of-checkpoint
# The weights are written in half precision beside the state of the optimizer, with torch.distributed.checkpoint.
import tempfile

import torch
import torch.distributed.checkpoint as dcp

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(12):
    if step == 10:
        weights = {name: value.half() for name, value in model.state_dict().items()}
        with tempfile.TemporaryDirectory() as folder:
            dcp.save({"model": weights, "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
