"""An LSTM on random sequences: padding, a state that is carried over, attention pooling, RMSprop."""

import torch
from torch import nn
from torch.nn import functional as F

DTYPE = torch.float32
SYMBOLS, WIDTH, LENGTH, BATCH = 19, 16, 10, 6


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.of_input = nn.Linear(WIDTH, 4 * WIDTH)
        self.of_state = nn.Linear(WIDTH, 4 * WIDTH, bias=False)

    def forward(self, x, hidden, memory):
        gates = self.of_input(x) + self.of_state(hidden)
        keep, write, read, new = gates.float().chunk(4, -1)
        memory = torch.sigmoid(keep + 1.0) * memory + torch.sigmoid(write) * torch.tanh(new)
        return torch.sigmoid(read) * torch.tanh(memory), memory


class Pooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, states, is_real):
        scores = self.score(states).squeeze(-1).float()
        weights = scores.masked_fill(~is_real, -1e9).softmax(-1)
        return (weights.unsqueeze(-1) * states).sum(1)


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH, padding_idx=0)
        self.cell = Cell()
        self.pooling = Pooling()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, symbols, state):
        hidden, memory = state
        states = []
        for x in self.embedding(symbols).unbind(1):
            hidden, memory = self.cell(x, hidden, memory)
            states.append(hidden)
        states = torch.stack(states, 1)
        pooled = self.norm(self.pooling(states, symbols != 0))
        return self.head(states), self.value(pooled).squeeze(-1), (hidden, memory)


def train(probe):
    torch.manual_seed(0)
    model = LSTM()
    nn.init.orthogonal_(model.cell.of_state.weight)
    symbols = torch.randint(1, SYMBOLS, (3, BATCH, LENGTH + 1))
    for row, length in enumerate((11, 11, 9, 8, 6, 5)):
        symbols[:, row, length:] = 0
    values = torch.rand(3, BATCH)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3, alpha=0.95, eps=1e-6, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=DTYPE is torch.float16)
    state = torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)
    losses = []
    for sequence, target in zip(symbols, values):
        optimizer.zero_grad()
        state = tuple(part.detach() for part in state)
        with torch.autocast("cpu", dtype=DTYPE, enabled=DTYPE is not torch.float32):
            logits, value, state = model(sequence[:, :-1], state)
        of_tokens = F.cross_entropy(logits.transpose(1, 2).float(), sequence[:, 1:], ignore_index=0)
        of_value = F.binary_cross_entropy_with_logits(value.float(), target)
        loss = of_tokens + 0.3 * of_value
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return model, losses
