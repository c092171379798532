"""What examples of pytorch/examples do, each with small random data, and with mixed precision as its README would add.

python examples.py NAME bfloat16|float16
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

NAME, DTYPE = sys.argv[1], getattr(torch, sys.argv[2])
STEPS = 4
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)  # the first fp16 steps overflow


def region():
    return torch.autocast("cpu", dtype=DTYPE)


def step(loss, optimizer):
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def mnist():
    """Convolutions, dropout, a scheduler, a test that is counted."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), nn.Linear(288, 10)
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(2):
        for _ in range(STEPS):
            x, y = torch.randn(8, 1, 14, 14), torch.randint(10, (8,))
            with region():
                loss = F.nll_loss(F.log_softmax(model(x), dim=1), y)
            step(loss, optimizer)
        scheduler.step()
        model.eval()
        with torch.no_grad(), region():
            output = model(torch.randn(32, 1, 14, 14))
            print(output.dtype, F.cross_entropy(output, torch.randint(10, (32,))).item(), output.argmax(1).tolist())
        model.train()


def dcgan():
    """Two models, two optimizers, two backwards into one of them, one scaler."""
    g = nn.Sequential(
        nn.ConvTranspose2d(8, 16, 4), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh()
    )
    d = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4), nn.Flatten(0)
    )
    of_d, of_g = (torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999)) for model in (d, g))
    criterion = nn.BCEWithLogitsLoss()
    for _ in range(STEPS):
        d.zero_grad()
        with region():
            on_real = criterion(d(torch.randn(4, 3, 8, 8)), torch.ones(4))
        scaler.scale(on_real).backward()
        with region():
            fake = g(torch.randn(4, 8, 1, 1))
            on_fake = criterion(d(fake.detach()), torch.zeros(4))
        scaler.scale(on_fake).backward()
        scaler.step(of_d)
        g.zero_grad()
        with region():
            of_fake = criterion(d(fake), torch.ones(4))
        scaler.scale(of_fake).backward()
        scaler.step(of_g)
        scaler.update()
        print(on_real.item(), on_fake.item(), of_fake.item(), scaler.get_scale())


def word_language_model():
    """An LSTM whose hidden state is carried on, clipped, and updated by hand through `.data`."""
    embedding, lstm, output = nn.Embedding(50, 16), nn.LSTM(16, 16, 2, dropout=0.2), nn.Linear(16, 50)
    model = nn.ModuleList([embedding, lstm, output])
    hidden = (torch.zeros(2, 4, 16), torch.zeros(2, 4, 16))
    for _ in range(STEPS):
        hidden = tuple(each.detach() for each in hidden)
        words = torch.randint(50, (9, 4))
        model.zero_grad()
        with region():
            with torch.backends.mkldnn.flags(enabled=False):  # it has no LSTM in 16 bits for many CPUs
                x, hidden = lstm(embedding(words[:-1]), hidden)
            loss = F.cross_entropy(output(x).view(-1, 50), words[1:].view(-1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-20.0)
        print(loss.item(), norm.item(), x.dtype, hidden[0].dtype)


def vae():
    """A loss in two parts, one of which overflows easily."""
    encoder, mean, spread = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
    decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))
    model = nn.ModuleList([encoder, mean, spread, decoder])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2 * STEPS):
        x = torch.rand(8, 64)
        with region():
            h = F.relu(encoder(x))
            mu, logvar = mean(h), spread(h)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss = F.binary_cross_entropy_with_logits(decoder(z), x, reduction="sum") + divergence
        step(loss, optimizer)
        print(loss.item(), loss.dtype, scaler.get_scale())


def language_translation():
    """nn.Transformer with masks, and greedy decoding in eval."""
    source, target, output = nn.Embedding(40, 16), nn.Embedding(40, 16), nn.Linear(16, 40)
    transformer = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    model = nn.ModuleList([source, target, output, transformer])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    for _ in range(STEPS):
        x, y = torch.randint(40, (4, 7)), torch.randint(40, (4, 6))
        with region():
            mask = nn.Transformer.generate_square_subsequent_mask(5)
            seen = transformer(source(x), target(y[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
            loss = F.cross_entropy(output(seen).transpose(1, 2), y[:, 1:])
        step(loss, optimizer)
        print(loss.item(), scaler.get_scale())
    model.eval()
    with torch.no_grad(), region():
        memory = transformer.encoder(source(x))
        words = torch.zeros(4, 1, dtype=torch.long)
        for _ in range(5):
            logits = output(transformer.decoder(target(words), memory)[:, -1])
            words = torch.cat([words, logits.argmax(-1, keepdim=True)], dim=1)
        print(memory.dtype, memory.float().sum().item(), logits.dtype, logits.float().sum().item(), words.tolist())


def time_sequence_prediction():
    """LSTM cells in double precision, and LBFGS, which calls a closure many times."""
    cell, output = nn.LSTMCell(1, 12).double(), nn.Linear(12, 1).double()
    model = nn.ModuleList([cell, output])
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
    waves = torch.sin(torch.arange(20).double() + torch.arange(4).double()[:, None])

    def closure():
        optimizer.zero_grad()
        state, predicted = None, []
        with region():
            for moment in waves[:, :-1].split(1, dim=1):
                state = cell(moment, state)
                predicted.append(output(state[0]))
            loss = F.mse_loss(torch.cat(predicted, dim=1), waves[:, 1:])
        print(loss.item(), loss.dtype)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


def hogwild():
    """A model in shared memory that one process trains, and another evaluates."""
    from torch import multiprocessing

    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).share_memory()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_train, args=(model,))
    process.start()
    process.join()
    with torch.no_grad(), region():
        y = model(torch.ones(2, 16))
    print(process.exitcode, y.dtype, y.tolist(), sum(p.double().sum().item() for p in model.parameters()))


def _train(model):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for _ in range(STEPS):
        with region():
            loss = F.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,)))
        step(loss, optimizer)


torch.manual_seed(0)
globals()[NAME]()
