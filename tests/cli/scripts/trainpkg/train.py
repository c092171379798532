import functools
import hashlib
import pathlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .model import SnippetClassifier, read_snippets


def precision(cfg, device):
    """Returns a factory of autocast contexts and a gradient scaler."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[cfg.amp_dtype]
    enabled = cfg.amp != "off"
    scale = dict(init_scale=cfg.init_scale, growth_interval=cfg.growth_interval,
                 enabled=enabled and dtype is torch.float16)
    if cfg.amp == "cuda":  # the interface before torch 2.4; without a GPU it turns itself off
        from torch.cuda.amp import GradScaler, autocast
        return functools.partial(autocast, enabled=enabled, dtype=dtype), GradScaler(**scale)
    try:
        from torch.amp import GradScaler, autocast
    except ImportError as exc:
        raise SystemExit("this needs torch >= 2.3, or --amp cuda") from exc
    return functools.partial(autocast, device, enabled=enabled, dtype=dtype), GradScaler(device, **scale)


def train_one_epoch(model, batches, optimizer, scheduler, scaler, autocast, cfg, device):
    model.train()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    total, count, skipped = 0.0, 0, 0
    for tokens, labels in batches:
        tokens, labels = tokens.to(device), labels.to(device)
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            loss = criterion(model(tokens), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
        else:
            scheduler.step()
        total += loss.item() * len(labels)
        count += len(labels)
    return total / count, skipped


@torch.no_grad()
def validate(model, batches, autocast, device):
    model.eval()
    total, correct, count = 0.0, 0, 0
    for tokens, labels in batches:
        tokens, labels = tokens.to(device), labels.to(device)
        with autocast():
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        total += loss.item()
        correct += (logits.argmax(-1) == labels).sum().item()
        count += len(labels)
    return total / count, correct / count


def fit(cfg, log=print):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(cfg.seed)
    generator = torch.Generator().manual_seed(cfg.seed)
    train_set = TensorDataset(*read_snippets(cfg.train_per_class, cfg.seq_len, generator, "train"))
    val_set = TensorDataset(*read_snippets(cfg.val_per_class, cfg.seq_len, generator, "val"))
    train_batches = DataLoader(train_set, cfg.batch_size, shuffle=True, generator=generator)
    val_batches = DataLoader(val_set, cfg.batch_size)

    model = SnippetClassifier(hidden=cfg.hidden).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=cfg.weight_decay)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=cfg.max_lr, epochs=cfg.epochs, steps_per_epoch=len(train_batches))
    autocast, scaler = precision(cfg, device)

    for epoch in range(cfg.epochs):
        loss, skipped = train_one_epoch(
            model, train_batches, optimizer, scheduler, scaler, autocast, cfg, device)
        val_loss, accuracy = validate(model, val_batches, autocast, device)
        log(f"epoch {epoch} loss {loss!r} val {val_loss!r} accuracy {accuracy!r} "
            f"skipped {skipped} scale {scaler.get_scale()!r} lr {scheduler.get_last_lr()[0]!r}")

    if cfg.out:
        path = pathlib.Path(cfg.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, path)
    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.cpu().numpy().tobytes())
    log(f"weights {sha.hexdigest()}")
    return model
