"""A run's settings, which are saved before its first step and read by `--resume`."""

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
    """One of the compared training runs, a row of the table."""

    precision: str
    library: str
    size: Size
    steps: int
    weights: str = FP32


@dataclass(frozen=True)
class Settings:
    """Everything that determines a run's final weights.

    Args:
        data: Absolute path of the text, or None for the standard library.
        preset: A name in `SIZES`.
        steps: Steps of each training run.
        device: Device to train on, as torch spells it.
        checkpoint_every: Steps between checkpoints.
        seed: Seed for the initial weights and the batches.
        threads: Number of CPU threads; it affects the order of sums, and so the bits of the result.
        emulated: Precisions that are too slow here for the preset's size.
        strategy: How the model is split between processes, or None for one process.
        processes: Number of processes; it affects the bits of the result like `threads`.
        text_digest: SHA-256 of the text, hexadecimal.
        weights: "fp32" compares torch.amp with castwise on fp32 weights. "bf16-split" compares castwise on fp32 weights
            with castwise on bf16 weights of `MasterWeights`.

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
        """Build settings from a result of `to_json`.

        Raises:
            UserError: `content`, read from `source`, was not written by this version.
        """
        if not _are_fields(content):
            raise UserError(
                f"{source} was not written by this version of castwise demo: start a new run without --resume"
            )
        return cls(**content)

    def to_json(self) -> dict[str, object]:
        """Return the fields by name."""
        return asdict(self)

    def runs(self) -> list[Training]:
        """Return the training runs: every precision with both libraries, or bf16 with both kinds of weights.

        The libraries take turns at going first, because machines slow down as they heat up.
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
    """Return True if all fields of `Settings` are present, have the right types and are in torch's ranges."""
    hints = get_type_hints(Settings)
    kinds = {name: list if get_origin(hint) is list else hint for name, hint in hints.items()}
    return (
        content.keys() == kinds.keys()
        and all(isinstance(content[name], kind) for name, kind in kinds.items())
        and 1 <= content["threads"] <= MAX_THREADS
        and all(isinstance(name, str) and name in PRECISIONS for name in content["emulated"])
    )


def size_of(preset: str) -> Size:
    """Return the model size of a preset.

    Raises:
        UserError: There is no preset of that name.
    """
    if preset not in SIZES:
        raise UserError(f"--preset must be one of {', '.join(SIZES)}, got {preset!r}")
    return SIZES[preset]
