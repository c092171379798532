"""A mixture of experts on random vectors: two of four experts by softmax, a balancing loss, a layer norm, Adam."""

import torch
from torch import nn
from torch.nn import functional as F

DTYPE = torch.float32
INPUTS, WIDTH, EXPERTS, CHOSEN, BATCH = 12, 16, 4, 2, 40


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x):
        probabilities = self.gate(x.float()).float().softmax(-1)
        weights, experts = probabilities.topk(CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        return probabilities, weights, experts


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, x):
        probabilities, weights, chosen = self.router(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            mixed = expert(x[rows]) * weights[rows, slots].unsqueeze(-1)
            out = out.index_add(0, rows, mixed.to(out.dtype))
        shares = F.one_hot(chosen, EXPERTS).float().mean((0, 1))
        return out, EXPERTS * (shares * probabilities.mean(0)).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(INPUTS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-5)
        self.mixture = Mixture()
        self.outputs = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = torch.tanh(self.inputs(x))
        mixed, balance = self.mixture(self.norm(x))
        return self.outputs(x + mixed), balance


def train(probe):
    torch.manual_seed(0)
    model = Model()
    for expert in model.mixture.experts:
        nn.init.orthogonal_(expert.up.weight)
    x, y = torch.randn(3, BATCH, INPUTS), torch.randn(3, BATCH, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=DTYPE is torch.float16)
    losses = []
    for inputs, targets in zip(x, y):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=DTYPE, enabled=DTYPE is not torch.float32):
            outputs, balance = model(inputs)
            loss = F.smooth_l1_loss(outputs.float(), targets, beta=0.5) + 0.02 * balance
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return model, losses
