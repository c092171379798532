"""Records of runs that never ran: log-normal gradients of a small transformer, in the format that `Monitor` writes."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from castwise.monitor._gzip_members import gzip_member

Record = dict[str, Any]

# Largest number, exponent of the smallest normal number, exponent of the smallest subnormal one.
FORMATS = {
    "fp16": (65504.0, -14, -24),
    "bf16": (3.3895313892515355e38, -126, -133),
    "e4m3": (448.0, -6, -9),
    "e5m2": (57344.0, -14, -16),
}
SPREAD_BITS = 2.5


def spelled(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def stats(center: float, scale: float, numel: int = 1 << 16, nonfinite: float = 0.0) -> Record:
    """Numbers whose binary logarithm is spread around `center`."""
    exponents = range(math.floor(center - 12), math.floor(center + 10))
    density = [math.exp(-(((exponent + 0.5 - center) / SPREAD_BITS) ** 2) / 2) for exponent in exponents]
    counts = [round(numel * each / sum(density)) for each in density]
    kept = [(exponent, count) for exponent, count in zip(exponents, counts, strict=True) if count]
    first, last = kept[0][0], kept[-1][0]
    largest, smallest = 2.0 ** (last + 0.7), 2.0 ** (first + 0.2)
    shift = math.log2(scale)
    formats = {}
    for name, (top, normal, subnormal) in FORMATS.items():
        lost = sum(count for exponent, count in kept if exponent + shift < subnormal - 1)
        coarse = sum(count for exponent, count in kept if subnormal - 1 <= exponent + shift < normal)
        formats[name] = {
            "flush": lost / numel,
            "subnormal": coarse / numel,
            "headroom_bits": math.log2(top / (largest * scale)),
        }
    return {
        "numel": numel,
        "largest": largest,
        "smallest": smallest,
        "zero": max(0.0, 1 - sum(counts) / numel),
        "nonfinite": nonfinite,
        "exponents": {"lowest": first, "counts": counts[exponents.index(first) : exponents.index(last) + 1]},
        "formats": formats,
    }


def modules(layers: int) -> list[str]:
    inner = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.0", "mlp.2")
    return ["tok_emb", *(f"blocks.{layer}.{name}" for layer in range(layers) for name in inner), "norm", "head"]


def sample(
    step: int,
    scale: float,
    gradients: Mapping[str, float],
    outputs: Mapping[str, float],
    lost_in_bf16: float = 0.01,
    not_finite: tuple[str, ...] = (),
) -> Record:
    """Ranges of modules by the binary logarithm of their gradients and outputs."""
    by_module = {name: stats(at, scale, nonfinite=0.1 * (name in not_finite)) for name, at in gradients.items()}
    return {
        "kind": "sample",
        "step": step,
        "scale": scale,
        "gradients": {f"{name}.weight": by_module[name] for name in gradients},
        "modules": by_module,
        "activations": {name: stats(at, 1.0) for name, at in outputs.items()},
        "weights": {f"{name}.weight": {"update_to_weight": 1e-3, "lost_in_bf16": lost_in_bf16} for name in gradients},
    }


def step(number: int, scale: float | None, cause: str | None = None, **more: Any) -> Record:
    return {
        "kind": "step",
        "step": number,
        "scale": scale,
        "skipped": cause is not None,
        "cause": cause,
        "parameters": [],
        "grad_norm": 1.0,
        "loss": 2.0,
        "seconds": 0.01,
        **more,
    }


def write(folder: Path, *records: Record, **settings: Any) -> Path:
    """Write a run's file; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {
        "kind": "run",
        "format": 3,
        "time": 1_780_000_000,
        "castwise": "0.2.0",
        "torch": "2.13.0",
        "device": "cpu",
        "settings": {"optimizer": "AdamW", "model": "GPT", "parameters": 9_859_584, "every": 100, **settings},
    }
    write_lines(folder / "monitor.jsonl.gz", *(json.dumps(record) for record in (head, *records)))
    return folder


def write_lines(path: Path, *lines: str) -> None:
    """Write a file with these lines, each a gzip member, as castwise writes records."""
    path.write_bytes(b"".join(gzip_member(f"{line}\n".encode()) for line in lines))


def lines_in(path: Path) -> list[str]:
    """The lines of a file of records, or of that in a folder."""
    file = path / "monitor.jsonl.gz" if path.is_dir() else path
    return gzip.decompress(file.read_bytes()).decode().splitlines()


def records_in(path: Path) -> list[Record]:
    """The records of a file as dicts."""
    return [json.loads(line) for line in lines_in(path)]


def healthy(folder: Path, steps: int = 4000, layers: int = 6) -> Path:
    """fp16 with room on both sides; two skips while the scale is found."""
    records = []
    for number in range(1, steps + 1):
        scale = 2.0 ** (18 - min(number - 1, 2))
        cause = "overflow" if number <= 2 else None
        loss = 4 + 6 * math.exp(-number / 900) + 0.15 * math.sin(number * 0.7)
        records.append(step(number, scale, cause, loss=loss, grad_norm=1 + 3 * math.exp(-number / 300)))
        if number % 100 == 0:
            gradients = {name: -16 - 0.3 * (i % 6) for i, name in enumerate(modules(layers))}
            records.append(sample(number, scale, gradients, dict.fromkeys(modules(layers), 1.0)))
    return write(folder, *records)


def troubled(folder: Path, steps: int = 6000, layers: int = 6, name: str = "") -> Path:
    """A head whose gradients fade, an attention whose outputs grow, bad batches, and overflows at the end."""
    names = modules(layers)
    late = 0.7 * steps
    records: list[Record] = []
    scale, calm = 2.0**16, 0
    for number in range(1, steps + 1):
        cause: str | None = None
        parameters: list[str] = []
        loss: float | str = 4 + 6 * math.exp(-number / 900) + 0.2 * math.sin(number * 0.7)
        if number % 1777 == 0:
            cause, loss = "non-finite loss", "nan"
        elif calm >= 400 and (scale >= 2.0**18 or (number > late and scale >= 2.0**15)):
            cause, parameters = "overflow", [f"blocks.{layers - 1}.attn.qkv.weight"]
        records.append(
            step(number, scale, cause, parameters=parameters, loss=loss, grad_norm=2 + math.sin(number / 70))
        )
        if number % 100 == 0:
            growth = max(0.0, (number - late) / steps * 15)
            gradients = {module: -17 - 0.4 * (i % 7) for i, module in enumerate(names)}
            gradients["head"] = -30 - 8 * number / steps
            gradients[f"blocks.{layers - 1}.attn.qkv"] = -14 + growth
            outputs = dict.fromkeys(names, 1.5)
            outputs[f"blocks.{layers - 1}.attn.proj"] = 3 + 4 * number / steps
            if name:
                gradients[name], outputs[name] = -20.0, 2.0
            broken = (f"blocks.{layers - 1}.attn.qkv",) if cause else ()
            records.append(sample(number, scale, gradients, outputs, lost_in_bf16=0.12, not_finite=broken))
        if cause == "overflow":
            scale, calm = scale / 2, 0
        elif calm == 400 and cause is None and scale < 2.0**18:
            scale, calm = scale * 2, calm + 1
        else:
            calm += 1
    return write(folder, *records, policy="float16")


def large(folder: Path, samples: int, layers: int = 50) -> Path:
    """A model of many modules with long names, one of which a diagnosis names."""
    inner = ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "up")
    names = ["model.embed", *(f"model.decoder.layers.{i}.attention.{name}" for i in range(layers) for name in inner)]
    names.append("head")
    culprit = f"model.decoder.layers.{layers // 2}.attention.o_proj"
    records: list[Record] = []
    for number in range(1, samples + 1):
        cause = "non-finite loss" if number == samples // 2 else None
        records.append(step(number, 2.0**14, cause, loss="nan" if cause else 2.0))
        gradients = {name: -16 - ((7 * i + 3 * number) % 50) / 10 for i, name in enumerate(names)}
        records.append(sample(number, 2.0**14, gradients, {name: 1 + at / 20 for name, at in gradients.items()}))
        if cause:
            code = f'policy = castwise.Policy(compute="float16", modules={{"{culprit}": "float32"}})'
            found = {"kind": "diagnosis", "step": number, "cause": cause, "phase": "forward", "op": "aten.bmm"}
            texts = {"text": "forward\n  input 0: -1 .. 1\nkeep it in fp32", "advice": "keep it in fp32"}
            more = {"summary": f"aten.bmm in {culprit} gives inf.", "code": code, "remedy": "float32"}
            records.append({**found, **texts, **more, "module": culprit})
    return write(folder, *records)
