import os
import pathlib

import torch
from torch import nn

MODULES = ("argparse", "bisect", "colorsys", "textwrap")


class SnippetClassifier(nn.Module):
    def __init__(self, vocab=128, dim=16, hidden=24, classes=len(MODULES)):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, hidden, batch_first=True)
        self.attend = nn.Linear(hidden, 1)
        self.dropout = nn.Dropout(0.1)
        self.classify = nn.Linear(hidden, classes)

    def forward(self, tokens):
        states, _ = self.rnn(self.embed(tokens))
        weights = self.attend(states).softmax(dim=1)
        return self.classify(self.dropout((weights * states).sum(dim=1)))


def read_snippets(per_class, length, generator, split):
    """Random windows; training takes the first 80 % of a file, validation the rest."""
    stdlib = pathlib.Path(os.__file__).parent
    tokens, labels = [], []
    for label, name in enumerate(MODULES):
        raw = (stdlib / f"{name}.py").read_bytes()
        text = torch.tensor([b for b in raw if b < 128])
        cut = len(text) * 4 // 5
        text = text[:cut] if split == "train" else text[cut:]
        for start in torch.randint(len(text) - length, (per_class,), generator=generator).tolist():
            tokens.append(text[start:start + length])
            labels.append(label)
    return torch.stack(tokens), torch.tensor(labels)
