"""What a run was asked to do: saved before its first step, read back on `--resume`, never asked twice."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_origin, get_type_hints

from castwise._user_error import UserError
from castwise.demo.gpt import EMULATED, SIZES, Size
from castwise.demo.hardware import PRECISIONS

MAX_THREADS = 1024
TORCH, CASTWISE = "torch.amp", "castwise"
FP32, BF16_SPLIT = WEIGHTS = ("fp32", "bf16-split")


@dataclass(frozen=True)
class Training:
    """One of the runs that are compared: a row of the table."""

    precision: str
    library: str
    size: Size
    steps: int
    weights: str = FP32


@dataclass(frozen=True)
class Settings:
    """All that decides about the weights a run ends with.

    Args:
        data: Absolute path of the text, or None for the standard library.
        preset: A name in `SIZES`.
        steps: Batches of each training.
        device: Where to train, as torch writes it.
        checkpoint_every: Steps between two checkpoints.
        seed: Decides the first weights and the batches.
        threads: CPU threads; sums are split among them, so another number gives other bits.
        emulated: Precisions too slow here for the preset's size.
        strategy: How the model is split between processes, or None for one process.
        processes: How many there are; other sums, so other bits.
        text_digest: SHA-256 of the text, hexadecimal.
        weights: "fp32": torch.amp and castwise are compared, on fp32 weights. "bf16-split": castwise on fp32 weights
            and on those of `MasterWeights`, in bf16.

    Raises:
        UserError: A value is out of range.
    """

    data: str | None
    preset: str
    steps: int
    device: str
    checkpoint_every: int
    seed: int
    threads: int
    emulated: list[str]
    strategy: str | None
    processes: int
    text_digest: str
    weights: str = FP32

    def __post_init__(self) -> None:
        size_of(self.preset)
        if self.weights not in WEIGHTS:
            raise UserError(f"--weights must be one of {', '.join(WEIGHTS)}, got {self.weights!r}")
        if self.weights == BF16_SPLIT and self.strategy is not None:
            raise UserError(f"--weights {BF16_SPLIT} trains in one process: leave out --strategy")
        for option, value in (("--steps", self.steps), ("--checkpoint-every", self.checkpoint_every)):
            if value < 1:
                raise UserError(f"{option} must be at least 1, got {value}")

    @classmethod
    def from_json(cls, content: dict[str, Any], source: str) -> Settings:
        """Build settings from what `to_json` gave.

        Raises:
            UserError: `content`, read from `source`, was not written by this version.
        """
        if not _are_fields(content):
            raise UserError(f"{source} was not written by this version of castwise demo")
        return cls(**content)

    def to_json(self) -> dict[str, object]:
        """The fields by name."""
        return asdict(self)

    def runs(self) -> list[Training]:
        """Every precision by both libraries, which take turns at going first: machines slow down as they heat up.

        With other weights than fp32 ones: bf16 with both.
        """
        sizes = {name: EMULATED if name in self.emulated else size_of(self.preset) for name in PRECISIONS}
        if self.weights != FP32:
            return [Training("bf16", CASTWISE, sizes["bf16"], self.steps, weights) for weights in (FP32, self.weights)]
        rows = []
        for index, (precision, size) in enumerate(sizes.items()):
            libraries = (TORCH, CASTWISE) if index % 2 == 0 else (CASTWISE, TORCH)
            rows += [Training(precision, library, size, self.steps) for library in libraries]
        return rows


def _are_fields(content: dict[str, Any]) -> bool:
    """Return True if all fields of `Settings` are there, of their types and in ranges that torch can take."""
    hints = get_type_hints(Settings)
    kinds = {name: list if get_origin(hint) is list else hint for name, hint in hints.items()}
    return (
        content.keys() == kinds.keys()
        and all(isinstance(content[name], kind) for name, kind in kinds.items())
        and 1 <= content["threads"] <= MAX_THREADS
        and all(isinstance(name, str) and name in PRECISIONS for name in content["emulated"])
    )


def size_of(preset: str) -> Size:
    """The sizes of a preset.

    Raises:
        UserError: There is none of that name.
    """
    if preset not in SIZES:
        raise UserError(f"--preset must be one of {', '.join(SIZES)}, got {preset!r}")
    return SIZES[preset]
