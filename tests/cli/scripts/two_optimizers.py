#!/usr/bin/env python
"""Autoencoder with a classification head on the code: the encoder is trained
with AdamW, the decoder and the head with SGD.  Two losses, one GradScaler.
"""
import argparse
import hashlib
import itertools

import numpy as np
import torch
from torch import nn


def make_blobs(n, dim, classes, seed):
    """Noisy nonlinear images of class centres."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, 6)) * 1.5
    mix = rng.normal(size=(6, dim)) / np.sqrt(6)
    labels = rng.integers(classes, size=n)
    latent = centres[labels] + 0.4 * rng.normal(size=(n, 6))
    data = np.tanh(latent @ mix) + 0.05 * rng.normal(size=(n, dim))
    return torch.from_numpy(data.astype(np.float32)), torch.from_numpy(labels)


def mlp(*sizes):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.1)]
    return nn.Sequential(*layers[:-1])


def loader(x, y, batch_size, generator):
    while True:
        order = torch.randperm(len(x), generator=generator)
        for idx in order.split(batch_size):
            if len(idx) == batch_size:
                yield x[idx], y[idx]


def sha256_of(*modules):
    h = hashlib.sha256()
    for module in modules:
        for _, t in module.state_dict().items():
            h.update(t.cpu().contiguous().numpy().tobytes())
    return h.hexdigest()


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--dim", type=int, default=48)
    p.add_argument("--classes", type=int, default=5)
    p.add_argument("--enc-lr", type=float, default=3e-3)
    p.add_argument("--dec-lr", type=float, default=5e-2)
    p.add_argument("--aux-weight", type=float, default=0.3)
    p.add_argument("--amp-dtype", choices=["fp16", "bf16"], default="fp16")
    p.add_argument("--init-scale", type=float, default=2.0 ** 20)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--log-every", type=int, default=10)
    return p.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    amp_dtype = torch.float16 if args.amp_dtype == "fp16" else torch.bfloat16

    x, y = make_blobs(512, args.dim, args.classes, args.seed)
    batches = loader(x, y, args.batch_size, torch.Generator().manual_seed(args.seed))

    encoder = mlp(args.dim, 32, 8).to(dev)
    decoder = mlp(8, 32, args.dim).to(dev)
    head = nn.Linear(8, args.classes).to(dev)

    # the fused kernel takes the scale and the inf flag and unscales by itself
    enc_opt = torch.optim.AdamW(encoder.parameters(), lr=args.enc_lr, fused=True)
    dec_opt = torch.optim.SGD(
        itertools.chain(decoder.parameters(), head.parameters()), lr=args.dec_lr, momentum=0.9)
    scaler = torch.GradScaler(dev.type, init_scale=args.init_scale, growth_interval=8,
                              enabled=amp_dtype is torch.float16)

    for step in range(1, args.steps + 1):
        inputs, labels = (t.to(dev, non_blocking=True) for t in next(batches))
        enc_opt.zero_grad()
        dec_opt.zero_grad()

        with torch.autocast(dev.type, dtype=amp_dtype):
            code = encoder(inputs)
            recon = decoder(code)
            cls = nn.functional.cross_entropy(head(code), labels)
            mse = nn.functional.mse_loss(recon, inputs)
            loss0 = mse + args.aux_weight * cls
            loss1 = args.aux_weight * cls + 1e-3 * code.float().pow(2).mean()

        # both graphs go through the encoder, hence retain_graph
        scaler.scale(loss0).backward(retain_graph=True)
        scaler.scale(loss1).backward()

        # only the decoder side is clipped, the encoder is unscaled inside step()
        scaler.unscale_(dec_opt)
        nn.utils.clip_grad_norm_(dec_opt.param_groups[0]["params"], max_norm=2.0)

        scaler.step(enc_opt)
        scaler.step(dec_opt)
        scaler.update()

        if step == 1 or step % args.log_every == 0:
            print(f"step {step:3d} loss0 {loss0.item()!r} loss1 {loss1.item()!r} "
                  f"scale {scaler.get_scale()!r}")

    encoder.eval(), head.eval()
    with torch.inference_mode(), torch.autocast(dev.type, dtype=amp_dtype):
        pred = head(encoder(x.to(dev))).argmax(1).cpu()
    print(f"accuracy {(pred == y).float().mean().item()!r}")
    print("weights", sha256_of(encoder, decoder, head))


if __name__ == "__main__":
    main()
