"""Train in bf16, without a gradient scaler, on data with one empty document; the loss turns NaN.

castwise run examples/nan_in_bf16.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    """Classifies documents, given as counts of 64 words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 128, bias=False)
        self.head = nn.Linear(128, 10)

    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, 10)."""
        hidden = torch.relu(self.embed(counts))
        hidden = hidden / hidden.norm(dim=-1, keepdim=True)
        return self.head(hidden)


def main() -> None:
    """Train for one epoch."""
    torch.manual_seed(0)
    documents = torch.poisson(torch.full((4096, 64), 2.0))
    labels = (documents @ torch.randn(64, 10)).argmax(-1)
    documents[1574] = 0.0  # an empty document
    loader = DataLoader(TensorDataset(documents, labels), batch_size=32, shuffle=True)

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, (counts, targets) in enumerate(loader, 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(counts), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 32 == 0:
            print(f"step {step}, loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
