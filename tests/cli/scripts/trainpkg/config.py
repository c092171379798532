import argparse
import dataclasses
from typing import Optional


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    epochs: int = 3
    batch_size: int = 16
    seq_len: int = 20
    train_per_class: int = 48
    val_per_class: int = 16
    hidden: int = 24
    max_lr: float = 2e-2
    weight_decay: float = 1e-2
    clip: float = 1.0
    amp: str = "auto"  # auto | cuda | off
    amp_dtype: str = "fp16"
    init_scale: float = 2.0 ** 18
    growth_interval: int = 6
    seed: int = 0
    out: Optional[str] = None

    CHOICES = {"amp": ("auto", "cuda", "off"), "amp_dtype": ("fp16", "bf16")}

    @classmethod
    def from_args(cls, argv=None):
        """An option for every field."""
        parser = argparse.ArgumentParser(prog="trainpkg")
        for field in dataclasses.fields(cls):
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                type=str if field.default is None else type(field.default),
                default=field.default, choices=cls.CHOICES.get(field.name))
        return cls(**vars(parser.parse_args(argv)))
