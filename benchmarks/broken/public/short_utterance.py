"""A recording is too short for its transcript, so its CTC loss is inf.

Source: https://github.com/k2-fsa/icefall/issues/135
Cause: ctc
Remedy: zero_infinity
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

BROKEN = os.environ.get("BROKEN", "1") == "1"
torch.manual_seed(0)


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(8, 16, 3, stride=2, padding=1), nn.Linear(16, 12)

    def forward(self, frames):
        return self.head(self.conv(frames).relu().transpose(1, 2)).float().log_softmax(-1)


model = Acoustic()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(16):
    frames, target = torch.randn(4, 8, 40), torch.randint(1, 12, (4, 6))
    lengths = torch.tensor([20, 18, 20, 3 if step == 6 else 16])
    with torch.autocast("cpu", torch.bfloat16):
        log_probs = model(frames)
    sizes = torch.full((4,), 6)
    loss = F.ctc_loss(log_probs.transpose(0, 1), target, lengths, sizes, zero_infinity=not BROKEN)  # <- fault
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
