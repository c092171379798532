"""What is run. A row is one line: a name, where its code comes from, and the program.

A *suite* is the tests of a library, from its sdist on PyPI, as they are. A *script* of this folder trains with a
library as its users do, and knows nothing of castwise; what PyPI has no source of it does in its own words, in the
shortest form, and its source says so. Both run under torch's mixed precision, and under castwise without a change:
suites after `castwise.install()`, scripts by `castwise run`. `models.py` and `optimizers.py` go through many models
and optimizers, and through castwise's own ways to use it.

To add one, append it to `ROWS` and run `make foreign ONLY=name`. A library that is new goes into requirements.txt.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import models

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Side:
    """How castwise comes in, in the words of `side.py` (`torch` if the program imports it), and further arguments."""

    under: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One program and the sides it is compared on, the first of which is torch's.

    Args:
        kind: `suite`, `script`, `model` or `optimizers`.
        name: Unique.
        source: Where the code comes from.
        program: A file of this folder and its arguments, or `-m` and a module and its arguments.
        sides: By name.
        sdist: The unpacked archive that the program runs in, `{}` being its version; None for an empty folder.
        seconds: After which a side is ended.
        ranks: Processes of one side, started by torchrun.
    """

    kind: str
    name: str
    source: str
    program: tuple[str, ...]
    sides: dict[str, Side]
    sdist: str | None = None
    seconds: int = 600
    ranks: int = 1


def suite(name: str, package: str, *arguments: str) -> Row:
    """Return a row of tests in the sdist of a package."""
    own = (
        "-c",
        str(HERE / "suites.ini"),
        "--rootdir=.",
        "--confcutdir=.",
        "--import-mode=importlib",
    )  # nothing of the folders above it
    program = ("-m", "pytest", "-q", *own, "-p", "outcomes", "-p", "no:cacheprovider", *arguments)
    sides = {"torch": Side("torch"), "castwise": Side("install")}
    sdist = f"{package}-{version(package)}"
    return Row("suite", name, f"sdist of {package} {version(package)}", program, sides, sdist)


def script(name: str, source: str, *program: str, cached: bool = False, ranks: int = 1) -> Row:
    """Return a row of a script; `cached` if it is also to run with `--weight-cache`: it writes no weight by `.data`."""
    sides = {"torch": Side("torch"), "castwise run": Side("run")}
    sides |= {"weight cache": Side("weight-cache")} if cached else {}
    return Row("script", name, source, program, sides, ranks=ranks)


def with_library(name: str, package: str, *program: str, cached: bool = False) -> Row:
    """Return a row of a script that trains with a library."""
    return script(name, f"own script, {package} {version(package)}", *program, cached=cached)


def idiom(name: str, source: str, *program: str, cached: bool = False, ranks: int = 1) -> Row:
    """Return a row of a script that does what another does, which PyPI does not have."""
    return script(name, f"own script after {source}", *program, cached=cached, ranks=ranks)


def model(name: str) -> Row:
    """Return a row of a model, in every way to use castwise."""
    ways = ("autocast", "monitor", "weight_cache", "policy")
    sides = {"torch": Side("torch", ("torch",)), "castwise run": Side("run", ("torch",))}
    sides |= {way: Side("torch", (way,)) for way in ways}
    return Row("model", name, "from its configuration", ("models.py", name), sides)


def optimizers(name: str, source: str, which: str) -> Row:
    """Return a row of all optimizers of a library, under castwise's own names and under `castwise run`."""
    sides = {"torch": Side("torch", ("torch",)), "castwise": Side("torch", ("castwise",))}
    sides |= {"castwise run": Side("run", ("torch",))}
    return Row("optimizers", name, source, ("optimizers.py", which), sides)


DTYPES = ("bfloat16", "float16")
EXAMPLES = (
    "mnist",
    "dcgan",
    "word_language_model",
    "vae",
    "language_translation",
    "time_sequence_prediction",
    "hogwild",
)
COMPILED = ("--torch_compile_backend", "aot_eager", "--eval_strategy", "no", "--max_steps", "2")
LIGHTNING = "the tests of Lightning's {} precision, which its sdists leave out"
ACCELERATE = ("accelerator", "cpu", "data_loader", "grad_sync", "kwargs_handlers", "optimizer", "scheduler", "utils")

ROWS = [
    suite("Accelerate", "accelerate", *(f"tests/test_{name}.py" for name in ACCELERATE)),
    suite(
        "timm", "timm", *(f"tests/test_{name}.py" for name in ("layers", "layers_pos_embed", "task", "train_resume"))
    ),
    *(
        idiom(f"Lightning Trainer, {precision}", LIGHTNING.format("Trainer"), "scripts/lightning_trainer.py", precision)
        for precision in ("bf16-mixed", "16-mixed")
    ),
    *(
        idiom(f"Lightning Fabric, {precision}", LIGHTNING.format("Fabric"), "scripts/lightning_fabric.py", precision)
        for precision in ("bf16-mixed", "16-mixed")
    ),
    idiom("ShardedGradScaler", "torch's test_fsdp_sharded_grad_scaler.py", "scripts/sharded_scaler.py"),
    idiom(
        "ShardedGradScaler, FSDP on two ranks",
        "torch's test_fsdp_sharded_grad_scaler.py",
        "scripts/sharded_ranks.py",
        ranks=2,
    ),
    script("torch's lists of ops", f"lists in torch.testing of torch {version('torch')}", "scripts/op_lists.py"),
    *(idiom(f"nanoGPT, {dtype}", "nanoGPT's train.py", "scripts/nanogpt.py", dtype, cached=True) for dtype in DTYPES),
    *(
        idiom(f"nanoGPT, compiled{name}", "nanoGPT's train.py", "scripts/nanogpt.py", "bfloat16", "--compile", *options)
        for name, options in (("", ()), (", its head in fp32", ("--fp32-head",)))
    ),
    *(
        idiom(f"pytorch/examples: {name}, {dtype}", f"pytorch/examples' {name}", "scripts/examples.py", name, dtype)
        for name in EXAMPLES
        for dtype in DTYPES
    ),
    *(
        idiom(f"timm train.py: {name}", "timm's train.py, with timm's parts", "scripts/timm_train.py", name, dtype)
        for name, dtype in (("vit_tiny_patch16_224", "bfloat16"), ("test_resnet", "float16"))
    ),
    with_library("Trainer", "transformers", "scripts/trainer.py", cached=True),
    with_library("Trainer, compiled", "transformers", "scripts/trainer.py", *COMPILED),
    with_library("ultralytics", "ultralytics", "scripts/ultralytics_train.py"),
    *(with_library(f"peft, {dtype}", "peft", "scripts/peft_lora.py", dtype) for dtype in DTYPES),
    with_library("peft, nothing merged", "peft", "scripts/peft_lora.py", "bfloat16", "--train-only", cached=True),
    *(with_library(f"diffusers, {dtype}", "diffusers", "scripts/diffusers_ema.py", dtype) for dtype in DTYPES),
    with_library("diffusers, no EMA", "diffusers", "scripts/diffusers_ema.py", "bfloat16", "--no-ema", cached=True),
    with_library("torchao", "torchao", "scripts/torchao_weights.py", cached=True),
    optimizers("torch.optim", f"torch {version('torch')}, options from torch.testing", "torch"),
    optimizers("pytorch_optimizer", f"pytorch_optimizer {version('pytorch_optimizer')}", "pytorch_optimizer"),
    *map(model, models.MODELS),
]
