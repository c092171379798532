"""Changes like those in `edits`, written after all limits of `castwise check` were fixed. None was moved for them.

They differ in kind from those: rewrites change how a program is built, fed, differentiated and stepped rather than an
expression, bugs are those of hooks, aliases, state and data, and most losses of precision are in what is kept.
"""

from __future__ import annotations

from benchmarks.changes.edits import Edit

SAME: dict[str, list[Edit]] = {
    "gpt": [
        Edit(
            "self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)",
            "(F.linear(x, part).view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv.weight.chunk(3))",
        ),
        Edit(
            "self.down(F.silu(self.gate(x)) * self.up(x))\n",
            """self.down(SiLU.apply(self.gate(x)) * self.up(x))


class SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x.float() * torch.sigmoid(x.float())).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].float()
        part = torch.sigmoid(x)
        return (grad.float() * part * (1 + x * (1 - part))).to(grad.dtype)
""",
        ),
        Edit(
            "F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)",
            "sum(F.cross_entropy(some.flatten(0, 1).float(), these.flatten(), ignore_index=-1, reduction='sum')"
            " for some, these in zip(logits.split(2), targets.split(2))) / (targets >= 0).sum()",
        ),
        Edit(
            """            scaler.scale(loss).backward()
            losses.append(loss.item())
""",
            """            losses.append(loss)
        scaler.scale(losses[-2] + losses[-1]).backward()
        losses[-2:] = [loss.item() for loss in losses[-2:]]
""",
        ),
        Edit("    model = GPT()\n", "    model = __import__('copy').deepcopy(GPT())\n"),
        Edit(
            "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n",
            """        norm = torch.cat([param.grad.flatten() for param in model.parameters()]).norm()
        for param in model.parameters():
            param.grad = param.grad * (0.5 / (norm + 1e-6)).clamp(max=1.0)
""",
        ),
    ],
    "cnn": [
        Edit(
            "self.stem(images)",
            "((self.stem.weight.flatten(1) @ F.unfold(images, 3, padding=1)) + self.stem.bias.view(-1, 1))"
            ".unflatten(-1, (SIZE, SIZE))",
        ),
        Edit(
            "F.cross_entropy(logits, targets, label_smoothing=0.1)",
            "torch.stack([F.cross_entropy(row.float(), target, label_smoothing=0.1)"
            " for row, target in zip(logits, targets)]).mean()",
        ),
        Edit(
            "in zip(images, labels):",
            "in torch.utils.data.DataLoader([*zip(images, labels)], batch_size=None, generator=torch.Generator()):",
        ),
        Edit(
            """            for average, param in zip(averaged, model.parameters()):
                average.lerp_(param, 0.1)
""",
            "            torch._foreach_lerp_(averaged, [*model.parameters()], 0.1)\n",
        ),
        Edit(
            "    images, labels =",
            """    for module in model.modules():
        module.register_forward_hook(lambda module, inputs, output: output.clone())
        module.register_full_backward_hook(lambda module, inputs, outputs: None)
    images, labels =""",
        ),
        Edit(
            "x = self.body(self.stem(images))\n",
            "x = self.stem(images)\n        for layer in self.body:\n            x = layer(x)\n",
        ),
    ],
    "experts": [
        Edit(
            """            rows, slots = torch.where(chosen == number)
            mixed = expert(x[rows]) * weights[rows, slots].unsqueeze(-1)
            out = out.index_add(0, rows, mixed.to(out.dtype))
""",
            "            out = out + (expert(x) * (weights * (chosen == number)).sum(-1, keepdim=True)).to(out.dtype)\n",
        ),
        Edit(
            "outputs, balance = model(inputs)",
            "outputs, balance = torch.func.functional_call(model, dict(model.named_parameters()), (inputs,))",
        ),
        Edit(
            "        scaler.scale(loss).backward()\n",
            """        params = [*model.parameters()]
        for param, grad in zip(params, torch.autograd.grad(scaler.scale(loss), params)):
            param.grad = grad
""",
        ),
        Edit("Adam(model.parameters(), lr", "Adam([{'params': [param]} for param in model.parameters()], lr"),
        Edit(
            "x, y = torch.randn(3, BATCH, INPUTS), torch.randn(3, BATCH, 3)",
            "x, y = (torch.from_numpy(torch.randn(3, BATCH, size).numpy().copy()) for size in (INPUTS, 3))",
        ),
        Edit(
            "        losses.append(loss.item())\n",
            """        losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            model(inputs)
        model.train()
""",
        ),
    ],
    "lstm": [
        Edit("self.embedding(symbols)", "F.embedding(symbols, self.embedding.weight, padding_idx=0)"),
        Edit(
            "self.pooling(states, symbols != 0)",
            "torch.vmap(lambda rows, real: self.pooling(rows[None], real[None])[0])(states, symbols != 0)",
        ),
        Edit(
            "F.cross_entropy(logits.transpose(1, 2).float(), sequence[:, 1:], ignore_index=0)",
            "sum(F.cross_entropy(logits[:, at].float(), sequence[:, at + 1], ignore_index=0, reduction='sum')"
            " for at in range(LENGTH)) / (sequence[:, 1:] != 0).sum()",
        ),
        Edit("RMSprop(model.parameters(), lr", "RMSprop([*model.parameters()][::-1], lr"),
        Edit(
            "logits, value, state = model(sequence[:, :-1], state)",
            "logits, value, state = model(sequence[:, :-1].flip(0), tuple(part.flip(0) for part in state))\n"
            "            logits, value, state = logits.flip(0), value.flip(0), tuple(part.flip(0) for part in state)",
        ),
        Edit(
            "self.cell(x, hidden, memory)",
            "torch.utils.checkpoint.checkpoint(self.cell, x, hidden, memory, use_reentrant=True)",
        ),
    ],
    "unet": [
        Edit(
            "        out = self.conv(F.silu(self.norm(x)))\n",
            """        groups = x.float().unflatten(1, (2, -1))
        variance, mean = torch.var_mean(groups, (2, 3, 4), correction=0, keepdim=True)
        normal = ((groups - mean) * torch.rsqrt(variance + 1e-5)).flatten(1, 2)
        out = self.conv(F.silu(normal * self.norm.weight.view(-1, 1, 1) + self.norm.bias.view(-1, 1, 1)))
""",
        ),
        Edit(
            "predicted = model(noisy, times)",
            "predicted = torch.cat([model(*part) for part in zip(noisy.split(4), times.split(4))])",
        ),
        Edit(
            "        scaler.update()\n",
            """        scaler.update()
        optimizer.load_state_dict(__import__('copy').deepcopy(optimizer.state_dict()))
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
""",
        ),
        Edit(
            """        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
""",
            """        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
""",
        ),
        Edit(
            "(weights * errors).mean()",
            "torch.stack([weight * error for weight, error in zip(weights, errors)]).mean()",
        ),
        Edit(
            """        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.first = nn.Conv2d(2, WIDTH, 3, padding=1)
        self.down = Stage(WIDTH, 2 * WIDTH)
        self.middle = Stage(2 * WIDTH, 2 * WIDTH)
        self.up = Stage(3 * WIDTH, WIDTH)
        self.last = nn.Conv2d(WIDTH, 2, 3, padding=1)

    def forward(self, x, times):
        time = self.time(embedded(times))
""",
            """        self.of_time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.first = nn.Conv2d(2, WIDTH, 3, padding=1)
        self.down = Stage(WIDTH, 2 * WIDTH)
        self.middle = Stage(2 * WIDTH, 2 * WIDTH)
        self.up = Stage(3 * WIDTH, WIDTH)
        self.last = nn.Conv2d(WIDTH, 2, 3, padding=1)

    def forward(self, x, times):
        time = self.of_time(embedded(times))
""",
        ),
    ],
}

LESS_ACCURATE: dict[str, list[Edit]] = {
    "gpt": [
        Edit(
            "        warmup.step()\n",
            """        warmup.step()
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(param.bfloat16())
""",
        ),
        Edit(
            "            scaler.scale(loss).backward()\n",
            """            scaler.scale(loss).backward()
            for param in model.parameters():
                param.grad = param.grad.bfloat16().float()
""",
        ),
    ],
    "cnn": [
        Edit(
            "        cosine.step()\n",
            """        cosine.step()
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16().float()
""",
        ),
        Edit("self.norm1(self.conv1(x))", "self.norm1((lambda out: out.bfloat16().to(out.dtype))(self.conv1(x)))"),
    ],
    "experts": [
        Edit("x, y = torch.randn(3, BATCH, INPUTS),", "x, y = torch.randn(3, BATCH, INPUTS).bfloat16().float(),"),
        Edit(
            "        scaler.update()\n",
            """        scaler.update()
        for state in optimizer.state.values():
            state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16().float()
""",
        ),
    ],
    "lstm": [
        Edit("tuple(part.detach() for part in state)", "tuple(part.detach().bfloat16().float() for part in state)"),
        Edit(
            "        scaler.unscale_(optimizer)\n",
            """        scaler.unscale_(optimizer)
        for param in model.parameters():
            param.grad = param.grad.half().float()
""",
        ),
    ],
    "unet": [
        Edit("F.interpolate(low.float(),", "F.interpolate(low.bfloat16(),"),
        Edit("(weights * errors).mean()", "(weights.half() * errors.half()).mean().float()"),
    ],
}

WRONG: dict[str, list[Edit]] = {
    "gpt": [
        Edit(
            "        return F.dropout(self.out(mixed), 0.1, self.training)\n",
            """        with torch.random.fork_rng():
            torch.manual_seed(7)
            return F.dropout(self.out(mixed), 0.1, self.training)
""",
            "blocks.0.attention",
        ),
        Edit(".transpose(1, 2).reshape(batch, length, WIDTH)", ".reshape(batch, length, WIDTH)", "blocks.0.attention"),
        Edit("    model = GPT()\n", "    model = GPT()\n    model.norm.weight.requires_grad_(False)\n", "norm.weight"),
        Edit(
            "    model = GPT()\n",
            "    model = GPT()\n    model.embedding.weight.register_hook(lambda grad: grad * 0.999)\n",
            "embedding",
        ),
        Edit("    for batch in data:\n", "    for batch in (data[0], data[1], data[1]):\n", "the data"),
        Edit(
            """        scaler.step(optimizer)
        scaler.update()
        warmup.step()
""",
            """        warmup.step()
        scaler.step(optimizer)
        scaler.update()
""",
            "optimizer",
        ),
    ],
    "cnn": [
        Edit("x.mean((2, 3), keepdim=True)\n", "x.mean((0, 2, 3), keepdim=True)\n", "body.1"),
        Edit("    images, labels =", "    model.body[0].norm1.eval()\n    images, labels =", "body.0.norm1"),
        Edit(
            "in zip(images, labels):",
            "in torch.utils.data.DataLoader([*zip(images, labels)], batch_size=None):",
            "the data",
        ),
        Edit("in zip(images, labels):", "in zip(images, labels.roll(1, 1)):", "loss"),
        Edit(
            "torch.optim.SGD(model.parameters(), lr=0.1,",
            "torch.optim.SGD([{'params': [*model.parameters()][:-1]}, {'params': [model.head.bias], 'lr': 0.0}], lr=0.1,",
            "optimizer",
        ),
        Edit(
            """        scaler.step(optimizer)
        scaler.update()
        cosine.step()
        with torch.no_grad():
            for average, param in zip(averaged, model.parameters()):
                average.lerp_(param, 0.1)
""",
            """        with torch.no_grad():
            for average, param in zip(averaged, model.parameters()):
                average.lerp_(param, 0.1)
        scaler.step(optimizer)
        scaler.update()
        cosine.step()
""",
            "averaged",
        ),
    ],
    "experts": [
        Edit(
            "            rows, slots = torch.where(chosen == number)\n",
            """            rows, slots = torch.where(chosen == number)
            rows, slots = rows[:16], slots[:16]
""",
            "mixture",
        ),
        Edit("out.index_add(0, rows, mixed.to(out.dtype))", "out.index_put((rows,), mixed.to(out.dtype))", "mixture"),
        Edit("self.router(x)", "self.router(x + 1e-6 * torch.randn_like(x))", "mixture"),
        Edit("nn.ModuleList([Expert() for _ in range(EXPERTS)])", "nn.ModuleList([Expert()] * EXPERTS)", "initial"),
        Edit(
            "torch.randn(3, BATCH, INPUTS), torch.randn(3, BATCH, 3)",
            "reversed((torch.randn(3, BATCH, 3), torch.randn(3, BATCH, INPUTS)))",
            "the data",
        ),
        Edit("+ 0.02 * balance", "+ 0.02 * balance * (len(losses) != 1)", "loss"),
    ],
    "lstm": [
        Edit("self.embedding(symbols)", "F.embedding(symbols, self.embedding.weight, max_norm=3.0)", "the model"),
        Edit(
            "torch.sigmoid(read) * torch.tanh(memory), memory",
            "torch.sigmoid(read) * torch.tanh(memory), memory.clamp(-0.3, 0.3)",
            "cell",
        ),
        Edit("part.detach() for part", "part.detach().roll(1, 0) for part", "the data"),
        Edit(
            "(value.float(), target)",
            "(value.float().unsqueeze(-1).expand(-1, BATCH), target.expand(BATCH, BATCH))",
            "loss",
        ),
        Edit(
            "        scaler.unscale_(optimizer)\n",
            """        scaler.unscale_(optimizer)
        for param in model.parameters():
            param.grad.mul_(param.grad.abs() > 1e-4)
""",
            "between backward and step",
        ),
        Edit(
            "        optimizer.zero_grad()\n",
            "        optimizer.zero_grad()\n        optimizer.state.clear()\n",
            "optimizer",
        ),
    ],
    "unet": [
        Edit("torch.randint(0, TIMES, (BATCH,))", "torch.randint(0, TIMES, (1,)).expand(BATCH)", "the data"),
        Edit("(1 - level).sqrt() * noise", "(1 - level).sqrt() * torch.randn_like(noise)", "the data"),
        Edit(".square().mean((1, 2, 3))", ".square().mean()", "loss"),
        Edit("name: param.detach().clone()", "name: param.detach()", "averaged"),
        Edit(
            "    losses = []\n", "    losses = []\n    model.last = __import__('copy').deepcopy(model.last)\n", "last"
        ),
        Edit(
            "        scaler.update()\n",
            """        scaler.update()
        for group in optimizer.param_groups:
            group["lr"] *= 0.999
""",
            "optimizer",
        ),
    ],
}
