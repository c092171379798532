"""Changes of the programs in this folder: replacements of text, each of which occurs once.

`SAME` are rewrites that compute the same function about as accurately. `LESS_ACCURATE` round more than float32 does.
`WRONG` compute another function; each names the module that does, "the model" for its own forward, "the data", "loss",
"optimizer", "between backward and step", or "initial" for weights before the first step.
"""

from __future__ import annotations

from typing import NamedTuple


class Edit(NamedTuple):
    """A change of a program.

    Args:
        old: Text that occurs once in the program.
        new: What replaces it.
        place: The module or part that computes something else.
    """

    old: str
    new: str
    place: str = ""


SAME: dict[str, list[Edit]] = {
    "gpt": [
        Edit("wide.square().mean(-1, keepdim=True)", "wide.pow(2).sum(-1, keepdim=True) / WIDTH"),
        Edit(
            "torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)",
            "1 / (wide * wide).mean(-1, True).add(self.eps).sqrt()",
        ),
        Edit(
            "return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight",
            "return F.rms_norm(wide, (WIDTH,), self.weight, self.eps)",
        ),
        Edit("base ** (-torch.arange(half) / half)", "torch.exp(-torch.arange(half) / half * math.log(base))"),
        Edit(
            "torch.cat([first * cos - second * sin, first * sin + second * cos], -1)",
            "x * torch.cat([cos, cos], -1) + torch.cat([-second, first], -1) * torch.cat([sin, sin], -1)",
        ),
        Edit("q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])", "(q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)"),
        Edit(
            "q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])",
            "torch.einsum('bhqd,bhkd->bhqk', q, k) * q.shape[-1] ** -0.5",
        ),
        Edit("scores.masked_fill(~mask, -math.inf)", "torch.where(mask, scores, -math.inf)"),
        Edit("scores.masked_fill(~mask, -math.inf)", "(scores + torch.full((length, length), -math.inf).triu(1))"),
        Edit(
            "scores.masked_fill(~mask, -math.inf).softmax(-1)",
            "scores.masked_fill(~mask, -math.inf).log_softmax(-1).exp()",
        ),
        Edit("mixed = (weights.to(v.dtype) @ v)", "mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)"),
        Edit(".transpose(1, 2).reshape(batch, length, WIDTH)", ".permute(0, 2, 1, 3).contiguous().flatten(2)"),
        Edit("F.silu(self.gate(x)) * self.up(x)", "self.up(x) * F.silu(self.gate(x))"),
        Edit("x = x + self.attention(self.norm1(x))", "x = torch.add(self.attention(self.norm1(x)), x)"),
        Edit("x = block(x)", "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"),
        Edit(
            "F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)",
            "F.nll_loss(logits.flatten(0, 1).float().log_softmax(-1), targets.flatten(), ignore_index=-1)",
        ),
        Edit(
            "F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)",
            "F.cross_entropy(logits.transpose(1, 2).float(), targets, ignore_index=-1)",
        ),
        Edit("loss_of(logits, targets) / len(batch)", "loss_of(logits, targets) * 0.5"),
        Edit("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"),
        Edit("eps=1e-8)", "eps=1e-8, foreach=True)"),
        Edit("eps=1e-8)", "eps=1e-8, fused=True)"),
        Edit("clip_grad_norm_(model.parameters(), 0.5)", "clip_grad_norm_(model.parameters(), 0.5, foreach=False)"),
        Edit(
            "decayed = [param for param in model.parameters() if param.dim() > 1]",
            "decayed = [param for name, param in model.named_parameters() if 'norm' not in name and 'bias' not in name]",
        ),
        Edit("lambda step: min(1.0, (step + 1) / 2)", "lambda step: 0.5 if step == 0 else 1.0"),
        Edit("    model = GPT()\n", "    model = torch.compile(GPT(), backend='eager')\n"),
    ],
    "cnn": [
        Edit("out = F.relu(self.norm1(self.conv1(x)))", "out = self.norm1(self.conv1(x)).clamp(min=0)"),
        Edit("F.relu(out + x)", "torch.relu(x + out)"),
        Edit("F.relu(out + x)", "torch.maximum(out + x, torch.zeros((), dtype=out.dtype))"),
        Edit("x.mean((2, 3), keepdim=True)\n", "F.adaptive_avg_pool2d(x, 1)\n"),
        Edit("x.mean((2, 3), keepdim=True)\n", "x.sum((2, 3), keepdim=True) / (x.shape[2] * x.shape[3])\n"),
        Edit(
            "torch.sigmoid(self.up(F.relu(self.down(scale))))",
            "1 / (1 + torch.exp(-self.up(F.relu(self.down(scale)))))",
        ),
        Edit("F.gelu(self.norm(self.shrink(x)))", "nn.GELU()(self.norm(self.shrink(x)))"),
        Edit("x = F.avg_pool2d(x, 2)", "x = x.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).mean((3, 5))"),
        Edit(
            "x = F.avg_pool2d(x, 2)",
            "x = (x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2]) / 4",
        ),
        Edit("self.head(x.mean((2, 3)))", "F.linear(x.flatten(2).mean(-1), self.head.weight, self.head.bias)"),
        Edit(
            "(images - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)",
            "(images / std.view(1, 3, 1, 1) - (mean / std).view(1, 3, 1, 1))",
        ),
        Edit(
            "(images - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)",
            "((images.movedim(1, -1) - mean) / std).movedim(-1, 1)",
        ),
        Edit(
            "torch.where(torch.rand(BATCH, 1, 1, 1) < 0.5, batch.flip(-1), batch)",
            "torch.where(torch.rand(BATCH, 1, 1, 1) < 0.5, batch[..., torch.arange(SIZE - 1, -1, -1)], batch)",
        ),
        Edit(
            "F.cross_entropy(logits, targets, label_smoothing=0.1)",
            "0.9 * F.cross_entropy(logits, targets) - 0.1 * logits.float().log_softmax(-1).mean()",
        ),
        Edit(
            "F.cross_entropy(logits, targets, label_smoothing=0.1)",
            "F.cross_entropy(logits, F.one_hot(targets, CLASSES) * 0.9 + 0.1 / CLASSES)",
        ),
        Edit("    images, labels =", "    model.to(memory_format=torch.channels_last)\n    images, labels ="),
        Edit("weight_decay=5e-4)", "weight_decay=5e-4, foreach=False)"),
        Edit("weight_decay=5e-4)", "weight_decay=5e-4, fused=True)"),
        Edit("average.lerp_(param, 0.1)", "average.mul_(0.9).add_(param, alpha=0.1)"),
        Edit("average.lerp_(param, 0.1)", "average += 0.1 * (param - average)"),
        Edit(
            "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)",
            "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + torch.tensor(step / 3 * torch.pi, dtype=torch.float64).cos().item()) / 2)",
        ),
        Edit(
            "        optimizer.zero_grad()\n        scaler.scale(loss)",
            "        model.zero_grad()\n        scaler.scale(loss)",
        ),
        Edit(
            "self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)",
            "self.conv2 = nn.Conv2d(channels, channels, 3, padding='same', bias=False)",
        ),
        Edit(
            "out = self.norm2(self.conv2(out))",
            "out = self.norm2(F.conv2d(F.pad(out, (1, 1, 1, 1)), self.conv2.weight))",
        ),
        Edit("        batch = torch.where", "        torch.set_num_threads(2)\n        batch = torch.where"),
    ],
    "experts": [
        Edit("self.gate(x.float()).float().softmax(-1)", "self.gate(x.float()).float().log_softmax(-1).exp()"),
        Edit(
            "probabilities.topk(CHOSEN, -1)", "(part[..., :CHOSEN] for part in probabilities.sort(-1, descending=True))"
        ),
        Edit("weights = weights / weights.sum(-1, keepdim=True)", "weights = F.normalize(weights, p=1, dim=-1)"),
        Edit('F.gelu(self.up(x), approximate="tanh")', 'nn.GELU("tanh")(self.up(x))'),
        Edit(
            'F.gelu(self.up(x), approximate="tanh")',
            "(lambda y: 0.5 * y * (1 + torch.tanh(0.7978845608028654 * (y + 0.044715 * y**3))))(self.up(x))",
        ),
        Edit(
            "for number, expert in enumerate(self.experts):",
            "for number, expert in reversed([*enumerate(self.experts)]):",
        ),
        Edit("rows, slots = torch.where(chosen == number)", "rows, slots = (chosen == number).nonzero(as_tuple=True)"),
        Edit(
            "expert(x[rows]) * weights[rows, slots].unsqueeze(-1)",
            "expert(x.index_select(0, rows)) * weights[rows, slots, None]",
        ),
        Edit(
            "out = out.index_add(0, rows, mixed.to(out.dtype))",
            "out = out + torch.zeros_like(out).index_put((rows,), mixed.to(out.dtype))",
        ),
        Edit(
            "out = out.index_add(0, rows, mixed.to(out.dtype))",
            "out = out.scatter_add(0, rows.unsqueeze(-1).expand(-1, WIDTH), mixed.to(out.dtype))",
        ),
        Edit(
            "F.one_hot(chosen, EXPERTS).float().mean((0, 1))",
            "torch.bincount(chosen.flatten(), minlength=EXPERTS).float() / chosen.numel()",
        ),
        Edit("EXPERTS * (shares * probabilities.mean(0)).sum()", "EXPERTS * shares @ probabilities.mean(0)"),
        Edit(
            "EXPERTS * (shares * probabilities.mean(0)).sum()",
            "EXPERTS * (shares * probabilities).sum() / len(probabilities)",
        ),
        Edit("torch.tanh(self.inputs(x))", "2 * torch.sigmoid(2 * self.inputs(x)) - 1"),
        Edit(
            "mixed, balance = self.mixture(self.norm(x))",
            "mixed, balance = self.mixture(F.layer_norm(x, (WIDTH,), self.norm.weight, self.norm.bias, 1e-5))",
        ),
        Edit("self.outputs(x + mixed)", "torch.addmm(self.outputs.bias, x + mixed, self.outputs.weight.T)"),
        Edit(
            "F.smooth_l1_loss(outputs.float(), targets, beta=0.5)",
            "2 * F.huber_loss(outputs.float(), targets, delta=0.5)",
        ),
        Edit(
            "F.smooth_l1_loss(outputs.float(), targets, beta=0.5)",
            "F.smooth_l1_loss(targets, outputs.float(), beta=0.5, reduction='none').mean(0).mean()",
        ),
        Edit("+ 0.02 * balance", "+ balance / 50"),
        Edit("weight_decay=0.01)", "weight_decay=0.01, foreach=True)"),
        Edit("weight_decay=0.01)", "weight_decay=0.01, fused=True)"),
        Edit("clip_grad_value_(model.parameters(), 0.05)", "clip_grad_value_(model.parameters(), 0.05, foreach=False)"),
        Edit(
            "torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)",
            "[param.grad.clamp_(-0.05, 0.05) for param in model.parameters()]",
        ),
        Edit("    model = Model()\n", "    model = torch.compile(Model(), backend='eager')\n"),
        Edit("optimizer.zero_grad(set_to_none=True)", "[setattr(param, 'grad', None) for param in model.parameters()]"),
    ],
    "lstm": [
        Edit(
            "gates = self.of_input(x) + self.of_state(hidden)",
            "gates = torch.cat([x, hidden.to(x.dtype)], -1) @ torch.cat([self.of_input.weight, self.of_state.weight], 1).T + self.of_input.bias",
        ),
        Edit(
            "keep, write, read, new = gates.float().chunk(4, -1)",
            "keep, write, read, new = gates.float().unflatten(-1, (4, WIDTH)).unbind(-2)",
        ),
        Edit("torch.sigmoid(keep + 1.0) * memory", "(1 - torch.sigmoid(-1.0 - keep)) * memory"),
        Edit("torch.sigmoid(write) * torch.tanh(new)", "torch.tanh(new) * torch.sigmoid(write)"),
        Edit("torch.sigmoid(write) * torch.tanh(new)", "torch.sigmoid(write) * (2 * torch.sigmoid(2 * new) - 1)"),
        Edit(
            "scores = self.score(states).squeeze(-1).float()",
            "scores = (states @ self.score.weight[0] + self.score.bias).float()",
        ),
        Edit("scores.masked_fill(~is_real, -1e9)", "scores.masked_fill(~is_real, -torch.inf)"),
        Edit(
            "scores.masked_fill(~is_real, -1e9).softmax(-1)",
            "(scores - scores.amax(-1, keepdim=True)).masked_fill(~is_real, -1e9).softmax(-1)",
        ),
        Edit("(weights.unsqueeze(-1) * states).sum(1)", "torch.einsum('bt,btw->bw', weights, states)"),
        Edit("(weights.unsqueeze(-1) * states).sum(1)", "torch.bmm(weights.unsqueeze(1), states.float()).squeeze(1)"),
        Edit("for x in self.embedding(symbols).unbind(1):", "for x in self.embedding(symbols.T):"),
        Edit(
            "for x in self.embedding(symbols).unbind(1):", "for x in (self.embedding(symbol) for symbol in symbols.T):"
        ),
        Edit("states = torch.stack(states, 1)", "states = torch.cat([state.unsqueeze(1) for state in states], 1)"),
        Edit("symbols != 0)", "symbols.bool())"),
        Edit(
            "F.cross_entropy(logits.transpose(1, 2).float(), sequence[:, 1:], ignore_index=0)",
            "F.cross_entropy(logits.flatten(0, 1).float(), sequence[:, 1:].flatten(), ignore_index=0)",
        ),
        Edit(
            "F.cross_entropy(logits.transpose(1, 2).float(), sequence[:, 1:], ignore_index=0)",
            "F.cross_entropy(logits[sequence[:, 1:] != 0].float(), sequence[:, 1:][sequence[:, 1:] != 0])",
        ),
        Edit(
            "F.binary_cross_entropy_with_logits(value.float(), target)",
            "F.binary_cross_entropy(torch.sigmoid(value.float()), target)",
        ),
        Edit(
            "F.binary_cross_entropy_with_logits(value.float(), target)",
            "(F.softplus(value.float()) - target * value.float()).mean()",
        ),
        Edit("loss = of_tokens + 0.3 * of_value", "loss = torch.add(of_tokens, of_value, alpha=0.3)"),
        Edit("momentum=0.5)", "momentum=0.5, foreach=True)"),
        Edit("tuple(part.detach() for part in state)", "(state[0].clone().detach(), state[1].clone().detach())"),
        Edit(
            "clip_grad_norm_(model.parameters(), 0.25)",
            "clip_grad_norm_([param for group in optimizer.param_groups for param in group['params']], 0.25)",
        ),
        Edit(
            "        scaler.unscale_(optimizer)\n",
            "        scaler.unscale_(optimizer)\n        torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])\n",
        ),
        Edit("optimizer.zero_grad()", "model.zero_grad(set_to_none=True)"),
        Edit(
            "self.norm(self.pooling(states, symbols != 0))",
            "self.norm((lambda x: x)(self.pooling(states, symbols > 0)))",
        ),
    ],
    "unet": [
        Edit(
            "torch.exp(-math.log(1000.0) * torch.arange(width // 2) / (width // 2))",
            "1000.0 ** (-torch.arange(width // 2) / (width // 2))",
        ),
        Edit("angles = times.float().unsqueeze(-1) * rates", "angles = torch.outer(times.float(), rates)"),
        Edit(
            "torch.cat([angles.sin(), angles.cos()], -1)", "torch.cat([angles.sin(), (angles + math.pi / 2).sin()], -1)"
        ),
        Edit(
            "self.of_time(time).unsqueeze(-1).unsqueeze(-1).chunk(2, 1)",
            "self.of_time(time)[:, :, None, None].chunk(2, 1)",
        ),
        Edit("self.conv(F.silu(self.norm(x)))", "self.conv((lambda y: y * torch.sigmoid(y))(self.norm(x)))"),
        Edit("F.silu(out * (1 + scale) + shift)", "F.silu(out + out * scale + shift)"),
        Edit("F.silu(out * (1 + scale) + shift)", "F.silu(torch.addcmul(shift, out, 1 + scale))"),
        Edit(
            "+ self.skip(x)",
            "+ torch.einsum('bihw,oi->bohw', x, self.skip.weight[:, :, 0, 0]) + self.skip.bias.view(-1, 1, 1)",
        ),
        Edit("F.avg_pool2d(high, 2)", "F.adaptive_avg_pool2d(high, SIZE // 2)"),
        Edit("F.avg_pool2d(high, 2)", "F.interpolate(high, scale_factor=0.5, mode='area')"),
        Edit('scale_factor=2, mode="bilinear")', 'size=(SIZE, SIZE), mode="bilinear", align_corners=False)'),
        Edit("torch.cat([wide, high], 1)", "torch.concat((wide, high), dim=-3)"),
        Edit("torch.cumprod(1 - betas, 0)", "torch.exp(torch.cumsum(torch.log1p(-betas), 0))"),
        Edit(
            "level.sqrt() * clean + (1 - level).sqrt() * noise",
            "torch.addcmul(level.sqrt() * clean, (1 - level).sqrt(), noise)",
        ),
        Edit(
            "(predicted.float() - noise).square().mean((1, 2, 3))",
            "F.mse_loss(predicted.float(), noise, reduction='none').flatten(1).mean(1)",
        ),
        Edit(
            "(predicted.float() - noise).square().mean((1, 2, 3))",
            "torch.linalg.vector_norm(predicted.float() - noise, dim=(1, 2, 3)) ** 2 / noise[0].numel()",
        ),
        Edit(
            "(kept[times] / (1 - kept[times])).clamp(max=5.0)",
            "torch.minimum(kept[times] / (1 - kept[times]), torch.tensor(5.0))",
        ),
        Edit("(weights * errors).mean()", "weights @ errors / len(errors)"),
        Edit("amsgrad=True)", "amsgrad=True, foreach=False)"),
        Edit("amsgrad=True)", "amsgrad=True, fused=True)"),
        Edit("averaged[name].mul_(decay).add_(param, alpha=1 - decay)", "averaged[name].lerp_(param, 1 - decay)"),
        Edit(
            "averaged[name].mul_(decay).add_(param, alpha=1 - decay)",
            "averaged[name] = decay * averaged[name] + (1 - decay) * param",
        ),
        Edit("min(0.99, (1 + step) / (10 + step))", "(1 + step) / (10 + step)"),
        Edit("    betas = torch", "    model.to(memory_format=torch.channels_last)\n    betas = torch"),
        Edit(
            "        optimizer.zero_grad()\n",
            "        for param in model.parameters():\n            param.grad = None\n",
        ),
    ],
}

LESS_ACCURATE: dict[str, list[Edit]] = {
    "gpt": [
        Edit(
            "wide.square().mean(-1, keepdim=True)",
            "wide.bfloat16().square().mean(-1, keepdim=True).float()",
            "blocks.0.norm1",
        ),
        Edit(
            "scores.masked_fill(~mask, -math.inf).softmax(-1)",
            "scores.masked_fill(~mask, -math.inf).bfloat16().softmax(-1)",
            "blocks.0.attention",
        ),
        Edit(
            "cos, sin = angles.cos(), angles.sin()",
            "cos, sin = angles.bfloat16().cos(), angles.bfloat16().sin()",
            "blocks.0.attention",
        ),
        Edit("logits.flatten(0, 1).float(), targets", "logits.flatten(0, 1).float().bfloat16(), targets", "loss"),
    ],
    "cnn": [
        Edit("x.mean((2, 3), keepdim=True)\n", "x.half().mean((2, 3), keepdim=True).to(x.dtype)\n", "body.1"),
        Edit(
            "(images - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)",
            "((images - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)).bfloat16().float()",
            "stem",
        ),
        Edit("self.head(x.mean((2, 3)))", "self.head(x.mean((2, 3)).bfloat16().to(x.dtype)).bfloat16()", "head"),
        Edit("average.lerp_(param, 0.1)", "average.copy_(average.bfloat16().lerp(param.bfloat16(), 0.1))", "averaged"),
    ],
    "experts": [
        Edit(
            "self.gate(x.float()).float().softmax(-1)",
            "self.gate(x.float()).bfloat16().softmax(-1).float()",
            "mixture.router",
        ),
        Edit("mixed.to(out.dtype))\n", "mixed.bfloat16().to(out.dtype))\n", "mixture"),
        Edit("torch.tanh(self.inputs(x))", "torch.tanh(self.inputs(x).half()).float()", ""),
        Edit("(outputs.float(), targets, beta", "(outputs.half().float(), targets.half().float(), beta", "loss"),
    ],
    "lstm": [
        Edit("gates.float().chunk(4, -1)", "gates.bfloat16().chunk(4, -1)", "cell"),
        Edit(
            "states.append(hidden)",
            "hidden, memory = hidden.half().float(), memory.bfloat16().float()\n            states.append(hidden)",
            "",
        ),
        Edit(
            "scores.masked_fill(~is_real, -1e9).softmax(-1)",
            "scores.masked_fill(~is_real, -1e9).bfloat16().softmax(-1)",
            "pooling",
        ),
        Edit("value.float(), target)", "value.float().bfloat16(), target.bfloat16())", "loss"),
    ],
    "unet": [
        Edit(
            "angles = times.float().unsqueeze(-1) * rates",
            "angles = (times.bfloat16().unsqueeze(-1) * rates.bfloat16()).float()",
            "time",
        ),
        Edit("torch.cumprod(1 - betas, 0)", "torch.cumprod((1 - betas).bfloat16(), 0).float()", ""),
        Edit(
            "out = self.conv(F.silu(self.norm(x)))",
            "out = self.conv(F.silu(self.norm(x.bfloat16().float())).half().float())",
            "down",
        ),
        Edit("(predicted.float() - noise)", "(predicted.bfloat16() - noise.bfloat16()).float()", "loss"),
    ],
}

WRONG: dict[str, list[Edit]] = {
    "gpt": [
        Edit("def __init__(self, eps=1e-5)", "def __init__(self, eps=1e-6)", "blocks.0.norm1"),
        Edit(
            "torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)",
            "1 / (wide.square().mean(-1, keepdim=True).sqrt() + self.eps)",
            "blocks.0.norm1",
        ),
        Edit("wide.square().mean(-1, keepdim=True)", "wide.var(-1, keepdim=True)", "blocks.0.norm1"),
        Edit("base=10_000.0", "base=10_001.0", "blocks.0.attention"),
        Edit(
            "torch.arange(x.shape[-2]).unsqueeze(1)",
            "torch.arange(1, x.shape[-2] + 1).unsqueeze(1) * 1.001",
            "blocks.0.attention",
        ),
        Edit("first * sin + second * cos], -1)", "first * sin - second * cos], -1)", "blocks.0.attention"),
        Edit("q, k = rotated(q), rotated(k)", "q, k = rotated(q), k", "blocks.0.attention"),
        Edit("math.sqrt(q.shape[-1])", "math.sqrt(WIDTH)", "blocks.0.attention"),
        Edit("dtype=torch.bool).tril()", "dtype=torch.bool).tril(1)", "blocks.0.attention"),
        Edit("scores.masked_fill(~mask, -math.inf)", "scores.masked_fill(~mask, -10.0)", "blocks.0.attention"),
        Edit(
            ".view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)",
            ".view(batch, length, HEADS, 3, -1).permute(3, 0, 2, 1, 4)",
            "blocks.0.attention",
        ),
        Edit(
            "F.dropout(self.out(mixed), 0.1, self.training)",
            "F.dropout(self.out(mixed), 0.11, self.training)",
            "blocks.0.attention",
        ),
        Edit("F.silu(self.gate(x))", "F.gelu(self.gate(x))", "blocks.0.feed_forward"),
        Edit(
            "return x + self.feed_forward(self.norm2(x))",
            "return x + self.feed_forward(self.norm2(x.detach()))",
            "blocks",
        ),
        Edit(
            "self.embedding(tokens) * math.sqrt(WIDTH)",
            "self.embedding(tokens) * math.sqrt(WIDTH) * 1.000001",
            "the model",
        ),
        Edit(
            "        self.head.weight = self.embedding.weight\n",
            "        self.head.weight = nn.Parameter(self.embedding.weight.detach().clone())\n",
            "head",
        ),
        Edit("targets.flatten(), ignore_index=-1)", "targets.flatten().clamp(min=0))", "loss"),
        Edit("loss_of(logits, targets) / len(batch)", "loss_of(logits, targets)", "loss"),
        Edit("tokens[:, :-1].clamp(min=0), tokens[:, 1:]", "tokens[:, :-1].clamp(min=0), tokens[:, :-1]", "loss"),
        Edit("betas=(0.9, 0.95)", "betas=(0.9, 0.96)", "optimizer"),
        Edit("eps=1e-8)", "eps=2e-8)", "optimizer"),
        Edit('"weight_decay": 0.1}', '"weight_decay": 0.101}', "optimizer"),
        Edit('"weight_decay": 0.0}', '"weight_decay": 0.001}', "optimizer"),
        Edit("clip_grad_norm_(model.parameters(), 0.5)", "clip_grad_norm_(decayed, 0.5)", "between backward and step"),
        Edit("        warmup.step()\n", "", "optimizer"),
        Edit(
            "        for tokens in batch:\n",
            "        for tokens in batch:\n            optimizer.zero_grad()\n",
            "between backward and step",
        ),
    ],
    "cnn": [
        Edit(
            "out = F.relu(self.norm1(self.conv1(x)))", "out = F.leaky_relu(self.norm1(self.conv1(x)), 1e-4)", "body.0"
        ),
        Edit(
            "self.norm2 = nn.BatchNorm2d(channels)", "self.norm2 = nn.BatchNorm2d(channels, eps=1.1e-5)", "body.0.norm2"
        ),
        Edit("self.norm1 = nn.BatchNorm2d(channels)", "self.norm1 = nn.BatchNorm2d(channels, momentum=0.11)", "buffer"),
        Edit(
            "self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)",
            "self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, padding_mode='circular', bias=False)",
            "body.0.conv1",
        ),
        Edit("return F.relu(out + x)", "return F.relu(out) + x", "body.0"),
        Edit("return F.relu(out + x)", "return F.relu(out + x.detach())", "body.0"),
        Edit("torch.sigmoid(self.up(", "F.hardsigmoid(self.up(", "body.1"),
        Edit("scale = x.mean((2, 3), keepdim=True)", "scale = x.amax((2, 3), keepdim=True)", "body.1"),
        Edit("F.gelu(self.norm", "F.gelu(approximate='tanh', input=self.norm", "the model"),
        Edit("nn.GroupNorm(4, 2 * WIDTH)", "nn.GroupNorm(2, 2 * WIDTH)", "norm"),
        Edit("x = F.avg_pool2d(x, 2)", "x = F.max_pool2d(x, 2)", "the model"),
        Edit("stride=2, padding=1)", "stride=2, padding=1, dilation=1, padding_mode='reflect')", "shrink"),
        Edit("torch.tensor([0.3, 0.25, 0.2])", "torch.tensor([0.3, 0.25, 0.201])", "the data"),
        Edit("mean.view(1, 3, 1, 1)", "mean.flip(0).view(1, 3, 1, 1)", "the data"),
        Edit("torch.rand(BATCH, 1, 1, 1) < 0.5", "torch.rand(BATCH, 1, 1, 1) < 0.6", "the data"),
        Edit("batch.flip(-1), batch)", "batch.flip(-2), batch)", "the data"),
        Edit("label_smoothing=0.1)", "label_smoothing=0.11)", "loss"),
        Edit(
            "F.cross_entropy(logits, targets, label_smoothing=0.1)",
            "0.9 * F.cross_entropy(logits, targets) + 0.1 / CLASSES",
            "loss",
        ),
        Edit("momentum=0.9, nesterov=True", "momentum=0.9", "optimizer"),
        Edit("weight_decay=5e-4)", "weight_decay=5e-5)", "optimizer"),
        Edit("momentum=0.9, nesterov=True", "momentum=0.9, dampening=0.0001", "optimizer"),
        Edit("T_max=3)", "T_max=4)", "optimizer"),
        Edit("        cosine.step()\n", "", "optimizer"),
        Edit("average.lerp_(param, 0.1)", "average.lerp_(param, 0.101)", "averaged"),
        Edit("        optimizer.zero_grad()\n", "", "between backward and step"),
        Edit('nonlinearity="relu")', 'nonlinearity="leaky_relu", a=0.01)', "initial"),
    ],
    "experts": [
        Edit("self.gate(x.float()).float().softmax(-1)", "self.gate(x.float()).float().sigmoid()", "mixture.router"),
        Edit(
            "self.gate(x.float()).float().softmax(-1)",
            "(self.gate(x.float()).float() * 1.0001).softmax(-1)",
            "mixture.router",
        ),
        Edit("        weights = weights / weights.sum(-1, keepdim=True)\n", "", "mixture.router"),
        Edit(
            "weights / weights.sum(-1, keepdim=True)",
            "weights / (weights.sum(-1, keepdim=True) + 1e-4)",
            "mixture.router",
        ),
        Edit("weights / weights.sum(-1, keepdim=True)", "weights / weights.sum(-1, keepdim=True).detach()", "mixture"),
        Edit(
            "weights, experts = probabilities.topk(CHOSEN, -1)",
            "weights, experts = probabilities.topk(CHOSEN, -1, largest=False)",
            "mixture.router",
        ),
        Edit('F.gelu(self.up(x), approximate="tanh")', "F.gelu(self.up(x))", "mixture.experts.0"),
        Edit('F.gelu(self.up(x), approximate="tanh")', "F.relu(self.up(x))", "mixture.experts.0"),
        Edit("weights[rows, slots].unsqueeze(-1)", "weights[rows, slots].unsqueeze(-1).detach()", "mixture"),
        Edit("weights[rows, slots].unsqueeze(-1)", "weights[rows, 1 - slots].unsqueeze(-1)", "mixture"),
        Edit(
            "for number, expert in enumerate(self.experts):",
            "for number, expert in enumerate(self.experts[:3]):",
            "mixture",
        ),
        Edit(
            "F.one_hot(chosen, EXPERTS).float().mean((0, 1))",
            "F.one_hot(chosen[:, 0], EXPERTS).float().mean(0)",
            "mixture",
        ),
        Edit("(shares * probabilities.mean(0)).sum()", "(shares * probabilities.mean(0).detach()).sum()", "mixture"),
        Edit("return out, EXPERTS * (shares", "return out, CHOSEN * (shares", "mixture"),
        Edit("torch.tanh(self.inputs(x))", "F.hardtanh(self.inputs(x))", "the model"),
        Edit("nn.LayerNorm(WIDTH, eps=1e-5)", "nn.LayerNorm(WIDTH, eps=1e-6)", "norm"),
        Edit("nn.LayerNorm(WIDTH, eps=1e-5)", "nn.LayerNorm(WIDTH, eps=1e-5, bias=False)", "norm"),
        Edit("self.mixture(self.norm(x))", "self.mixture(x)", "the model"),
        Edit("self.outputs(x + mixed)", "self.outputs(mixed)", "the model"),
        Edit("beta=0.5)", "beta=0.51)", "loss"),
        Edit("+ 0.02 * balance", "+ 0.021 * balance", "loss"),
        Edit("eps=1e-6, weight_decay", "eps=1e-8, weight_decay", "optimizer"),
        Edit("optimizer = torch.optim.Adam(", "optimizer = torch.optim.AdamW(", "optimizer"),
        Edit(
            "clip_grad_value_(model.parameters(), 0.05)",
            "clip_grad_value_(model.parameters(), 0.06)",
            "between backward and step",
        ),
        Edit(
            "        scaler.unscale_(optimizer)\n        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)\n",
            "",
            "between backward and step",
        ),
        Edit("nn.init.orthogonal_(expert.up.weight)", "nn.init.orthogonal_(expert.up.weight, gain=1.001)", "initial"),
    ],
    "lstm": [
        Edit("torch.sigmoid(keep + 1.0)", "torch.sigmoid(keep)", "cell"),
        Edit("keep, write, read, new = gates", "write, keep, read, new = gates", "cell"),
        Edit("torch.sigmoid(write) * torch.tanh(new)", "F.hardsigmoid(write) * torch.tanh(new)", "cell"),
        Edit("torch.sigmoid(read) * torch.tanh(memory), memory", "torch.sigmoid(read) * memory, memory", "cell"),
        Edit("self.of_state(hidden)", "self.of_state(hidden.detach())", "cell"),
        Edit(
            "self.of_input = nn.Linear(WIDTH, 4 * WIDTH)",
            "self.of_input = nn.Linear(WIDTH, 4 * WIDTH, bias=False)",
            "initial",
        ),
        Edit("scores.masked_fill(~is_real, -1e9)", "scores.masked_fill(~is_real, -5.0)", "pooling"),
        Edit("scores.masked_fill(~is_real, -1e9)", "(scores * is_real)", "pooling"),
        Edit("(weights.unsqueeze(-1) * states).sum(1)", "(weights.unsqueeze(-1) * states).mean(1)", "pooling"),
        Edit("padding_idx=0)", "padding_idx=1)", "initial"),
        Edit("symbols != 0)", "symbols >= 0)", "the model"),
        Edit("states.append(hidden)", "states.append(memory)", "the model"),
        Edit("self.norm = nn.LayerNorm(WIDTH)", "self.norm = nn.LayerNorm(WIDTH, eps=1e-4)", "norm"),
        Edit("pooled = self.norm(", "pooled = (", "the model"),
        Edit("self.value(pooled)", "self.value(pooled.detach())", "the model"),
        Edit(
            "for x in self.embedding(symbols).unbind(1):",
            "for x in self.embedding(symbols).flip(1).unbind(1):",
            "the model",
        ),
        Edit("sequence[:, 1:], ignore_index=0)", "sequence[:, 1:])", "loss"),
        Edit(
            "(3, BATCH, LENGTH + 1))", "(3, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(5))", "the data"
        ),
        Edit("of_tokens + 0.3 * of_value", "of_tokens + 0.301 * of_value", "loss"),
        Edit("of_tokens + 0.3 * of_value", "of_tokens + 0.3 * of_value.detach()", "loss"),
        Edit("alpha=0.95", "alpha=0.951", "optimizer"),
        Edit("momentum=0.5)", "momentum=0.5, centered=True)", "optimizer"),
        Edit(
            "state = tuple(part.detach() for part in state)",
            "state = tuple(torch.zeros_like(part) for part in state)",
            "the data",
        ),
        Edit(
            "clip_grad_norm_(model.parameters(), 0.25)",
            "clip_grad_norm_(model.parameters(), 0.25, norm_type=1.0)",
            "between backward and step",
        ),
        Edit(
            "clip_grad_norm_(model.parameters(), 0.25)",
            "clip_grad_value_(model.parameters(), 0.25)",
            "between backward and step",
        ),
        Edit(
            "nn.init.orthogonal_(model.cell.of_state.weight)",
            "nn.init.xavier_uniform_(model.cell.of_state.weight)",
            "initial",
        ),
    ],
    "unet": [
        Edit("math.log(1000.0)", "math.log(10000.0)", "the model"),
        Edit("/ (width // 2))", "/ (width // 2 - 1))", "the model"),
        Edit("torch.cat([angles.sin(), angles.cos()], -1)", "torch.cat([angles.cos(), angles.sin()], -1)", "the model"),
        Edit("nn.GroupNorm(2, inputs)", "nn.GroupNorm(2, inputs, eps=1e-6)", "down.norm"),
        Edit("self.conv(F.silu(self.norm(x)))", "self.conv(F.mish(self.norm(x)))", "down"),
        Edit("out * (1 + scale) + shift", "out * scale + shift", "down"),
        Edit("scale, shift = self", "shift, scale = self", "down"),
        Edit("+ self.skip(x)", "+ self.skip(x).detach()", "down"),
        Edit("F.avg_pool2d(high, 2)", "F.max_pool2d(high, 2)", "the model"),
        Edit('mode="bilinear")', 'mode="nearest")', "the model"),
        Edit('mode="bilinear")', 'mode="bilinear", align_corners=True)', "the model"),
        Edit("torch.cat([wide, high], 1)", "torch.cat([high, wide], 1)", "the model"),
        Edit(
            "self.middle(self.down(F.avg_pool2d(high, 2), time), time)",
            "self.middle(self.down(F.avg_pool2d(high, 2), time), time.detach())",
            "the model",
        ),
        Edit("torch.linspace(1e-3, 0.05, TIMES)", "torch.linspace(1e-3, 0.0501, TIMES)", "the data"),
        Edit("torch.cumprod(1 - betas, 0)", "torch.cumprod(1 - betas, 0).roll(1)", "the data"),
        Edit("(1 - level).sqrt() * noise", "(1 - level) * noise", "the data"),
        Edit("(1 - level).sqrt() * noise", "(1 - level + 1e-5).sqrt() * noise", "the data"),
        Edit("(predicted.float() - noise).square()", "(predicted.float() - clean).square()", "loss"),
        Edit("(predicted.float() - noise).square()", "(predicted.float() - noise).abs()", "loss"),
        Edit(".clamp(max=5.0)", ".clamp(max=4.0)", "loss"),
        Edit("loss = (weights * errors).mean()", "loss = (weights * errors).sum() / weights.sum()", "loss"),
        Edit("amsgrad=True)", "amsgrad=False)", "optimizer"),
        Edit("weight_decay=0.02", "weight_decay=0.0201", "optimizer"),
        Edit("min(0.99, (1 + step) / (10 + step))", "min(0.99, (1 + step) / (11 + step))", "averaged"),
        Edit(
            "torch.randint(0, TIMES, (BATCH,)), torch.randn_like(clean)",
            "torch.randint(1, TIMES, (BATCH,)), torch.randn_like(clean)",
            "the data",
        ),
        Edit("std=0.05)", "std=0.051)", "initial"),
    ],
}
